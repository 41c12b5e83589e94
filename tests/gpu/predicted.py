"""Write what the plan says of the steps that throughput.py measured, beside what was measured, as rows of JSON.

    python tests/gpu/predicted.py ROWS gpt.jsonl resnet.jsonl

Compiled rows are left out: the plan doesn't know how much memory they save. It needs no GPU: rows of another machine
can be planned afterwards.
"""

import json
import sys
from functools import partial
from pathlib import Path

from record import append
from throughput import LARGE, Images, Language

from mpdemo.tools.plan import own
from mpdemo.tools.plan.gpus import named
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.request import PlanRequest


def gpt():
    """The GPT that throughput.py trains, and two samples."""
    return Language().build(()), Language().batch(2, ())


def resnet():
    """The ResNet that throughput.py trains, and two samples."""
    return Images().build(()), Images().batch(2, ())


def predict(model, row, gpu) -> dict:
    """Return a measured row's memory in GiB and seconds per step, each beside what the plan says of it."""
    way = {"precision": "autocast", "checkpointing": "checkpointing" in row["options"]}
    request = PlanRequest(model, batch=row["batch"], gpu=gpu)
    plan = own.with_times(request, partial(own.replicated, parts=(1,), **way))
    facts = {name: row[name] for name in ("model", "options", "batch")} | {"gpu": gpu}
    memory = {"measured_gib": row["peak_memory_gib"], "predicted_gib": plan.memory / 2**30}
    times = {"measured_seconds": row["median_seconds"], "predicted_seconds": plan.seconds}
    return facts | memory | times | {"predicted_spread": max(plan.between) / plan.seconds - 1}


def main():
    out, *files = sys.argv[1:]
    for file in filter(Path.exists, map(Path, files)):
        measured = [json.loads(line) for line in file.read_text().splitlines()]
        first, gpu = measured[0], named(measured[0]["peak_from"]) or "a100"
        Language.size = {name: first.get(name) for name in LARGE}
        Images.name, Images.pixels = first["model"], first.get("image_size")
        model = OwnModel(f"{__file__}:{file.stem}")
        planned = [row for row in measured if "error" not in row and "compile" not in row["options"]]
        append([predict(model, row, gpu) for row in planned], out)


if __name__ == "__main__":
    main()
