"""Run under torchrun: the pipeline rows of the benchmark on a toy, written to argv[1]."""

import json
import sys

from mpdemo.bench.pipelines import PIPELINE, pipeline_rows
from mpdemo.settings import Settings
from mpdemo.world.env import claim_cores, process_group, where_am_i

VARIANTS = [("naive", 1, "linear2"), ("1f1b", 4, "linear2"), ("zbv", 4, "1,2,3")]

if __name__ == "__main__":
    world = where_am_i()
    claim_cores(world)
    with process_group(world, timeout=60):
        rows = pipeline_rows(world, 4, Settings(model="toy", batch_size=64, image_size=28, **PIPELINE), VARIANTS)
    if world.rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(rows, file)
