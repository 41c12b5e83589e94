"""Run under torchrun: the pipeline rows of the benchmark on a toy, written to argv[1]."""

import json
import sys

from mpdemo.bench.pipelines import pipeline_rows, pipeline_settings
from mpdemo.trial import join_world

VARIANTS = [("naive", 1, "linear2"), ("1f1b", 4, "linear2"), ("zbv", 4, "1,2,3")]

if __name__ == "__main__":
    with join_world() as world:
        rows = pipeline_rows(world, 4, pipeline_settings(model="toy", batch_size=64, image_size=28), VARIANTS)
    if world.rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(rows, file)
