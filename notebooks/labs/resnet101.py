"""What the planner says of a ResNet-101 on two GPUs: where to cut it, and how much memory each schedule needs.

    python -m mpdemo.labs.resnet101 runs/resnet101

It needs no GPU, and no process group; it writes ``summary.json`` in the folder. Its peak memory and its time are too
much for a login node, so it is a job. Taught in notebooks/05_pipeline.ipynb.
"""

import sys
from dataclasses import replace

from mpdemo.cuts import block_names
from mpdemo.plan import planner
from mpdemo.plan.fits import each_stage
from mpdemo.plan.request import MIB, PlanRequest
from mpdemo.training.log import RunLog

BATCH, MICROBATCHES = 128, 8
COMPARED, SCHEDULES = (8, 16, 32), ("GPipe", "1F1B")  # microbatches and schedules whose memory is estimated


def cuts() -> dict:
    """Return the two cuts by name: the share of the work on the first device, and the speed-up over one device.

    The planned one also has ``peak``: microbatches -> schedule -> MiB of every device.
    """
    request, rows = PlanRequest("resnet101", BATCH, devices=2, optimizer="sgd", gpu="a100"), {}
    after_layer2 = block_names("resnet101").index("layer3.0")
    usual = planner.evaluate(request, "1F1B", MICROBATCHES, [after_layer2])
    planned = planner.best_split(request, "1F1B", MICROBATCHES)
    costs = [cost.both for cost in request.costs(BATCH // MICROBATCHES)]
    for name, candidate in (("usual", usual), ("planned", planned)):
        (point,) = candidate.points  # the first block of the second stage
        speedup = request.one_device_seconds / candidate.step_time
        rows[name] = {"share": sum(costs[:point]) / sum(costs), "speedup": speedup}
    (point,) = planned.points
    rows["planned"]["peak"] = {M: {name: peak_memory(request, name, M, point) for name in SCHEDULES} for M in COMPARED}
    return rows


def peak_memory(request, schedule, microbatches, point) -> list[int]:
    """Return the peak of every device in MiB, with momentum, for a cut before the block `point`."""
    devices = each_stage(replace(request, optimizer="momentum"), schedule, microbatches, str(point))
    return [round(device.peak / MIB) for device in devices]


if __name__ == "__main__":
    RunLog(sys.argv[1], True).finish({"cuts": cuts()})
