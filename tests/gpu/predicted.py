"""Write what the plan says of the steps that throughput.py measured, beside what was measured, as rows of JSON.

    python tests/gpu/predicted.py ROWS gpt.jsonl resnet.jsonl

The plan knows bf16 and activation checkpointing; what other options change, such as compilation, is not predicted.
"""

import json
import sys
from pathlib import Path

import torch
from throughput import Images, Language

from mpdemo.models.own import OwnModel
from mpdemo.plan import own
from mpdemo.plan.request import PlanRequest
from mpdemo.world.gpus import named


def gpt():
    """The GPT that throughput.py trains, and two samples."""
    return Language().build(()), Language().batch(2, ())


def resnet():
    """The ResNet that throughput.py trains, and two samples."""
    return Images().build(()), Images().batch(2, ())


def predict(model, row, gpu) -> dict:
    """Return a measured row's memory in GiB and seconds per step, each beside what the plan says of it."""
    way = {"bf16": True, "checkpointing": "checkpointing" in row["options"]}
    plan = own.replicated(PlanRequest(model, batch=row["batch"], gpu=gpu), parts=(1,), **way)
    return {
        "model": row["model"],
        "options": row["options"],
        "batch": row["batch"],
        "gpu": gpu,
        "measured_gib": row["peak_memory_gib"],
        "predicted_gib": plan.memory / 2**30,
        "measured_seconds": row["median_seconds"],
        "predicted_seconds": plan.seconds,
    }


def main():
    out, *files = sys.argv[1:]
    gpu = (torch.cuda.is_available() and named(torch.cuda.get_device_name())) or "a100"
    for file in filter(Path.exists, map(Path, files)):
        model = OwnModel(f"{__file__}:{file.stem}")
        measured = [json.loads(line) for line in file.read_text().splitlines()]
        with open(out, "a") as rows:
            for row in measured:
                if "error" not in row:
                    rows.write(json.dumps(predict(model, row, gpu)) + "\n")


if __name__ == "__main__":
    main()
