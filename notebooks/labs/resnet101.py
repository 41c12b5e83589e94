"""What the planner says of a ResNet-101 on two GPUs: where to cut it, and how much memory each schedule needs.

    python -m mpdemo.labs.resnet101 runs/resnet101

It needs no GPU, and no process group; it writes ``summary.json`` in the folder. Its peak memory and its time are too
much for a login node, so it is a job. Taught in notebooks/05_pipeline.ipynb.
"""

import sys

from mpdemo.plan import memory, planner
from mpdemo.plan.command import plan
from mpdemo.training.log import RunLog

BATCH, IMAGE_SIZE, MICROBATCHES = 128, 224, 8
COMPARED = (8, 16, 32)  # microbatches whose memory is estimated


def cuts() -> dict:
    """Return the two cuts by name: the share of the work on the first device, and the speed-up over one device.

    The planned one also has ``peak``: microbatches -> schedule -> MiB of every device.
    """
    options = {"batch": BATCH, "gpu_memory": "40GiB", "microbatches": MICROBATCHES, "schedule": "1F1B"}
    chosen = plan(model="resnet101", stages=2, cost="a100", **options)
    costs = [cost.both for cost in chosen.job.costs[BATCH // MICROBATCHES]]
    one_device, rows = planner.one_device_step_time(chosen.job), {}
    for name, candidate in (("usual", chosen.usual()), ("planned", chosen.best)):
        (point,) = candidate.points  # the first block of the second stage
        rows[name] = {"share": sum(costs[:point]) / sum(costs), "speedup": one_device / candidate.step_time}
    rows["planned"]["peak"] = {M: {name: peak_memory(point, name, M) for name in ("GPipe", "1F1B")} for M in COMPARED}
    return rows


def peak_memory(point, schedule, microbatches) -> list[int]:
    """Return the peak of every device in MiB, for a cut before the block with this number."""
    options = {"schedule": schedule, "microbatches": microbatches, "optimizer": "momentum"}
    devices = memory.estimate("resnet101", [point], BATCH, IMAGE_SIZE, **options)
    return [round(device.peak / memory.MIB) for device in devices]


if __name__ == "__main__":
    RunLog(sys.argv[1], True).finish({"cuts": cuts()})
