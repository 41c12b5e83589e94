"""What the planner says of a ResNet-101 on two GPUs: where to cut it, and how much memory each schedule needs.

    python -m mpdemo.labs.resnet101 runs/resnet101

It needs no GPU, and no process group; it writes ``summary.json`` in the folder. Its peak memory and its time are too
much for a login node, so it is a job. Taught in notebooks/05_pipeline.ipynb.
"""

import sys
from dataclasses import replace

from mpdemo.plan import planner
from mpdemo.plan.command import plan
from mpdemo.plan.subject import MIB
from mpdemo.training.log import RunLog

BATCH, MICROBATCHES = 128, 8
COMPARED, SCHEDULES = (8, 16, 32), ("GPipe", "1F1B")  # microbatches and schedules whose memory is estimated


def cuts() -> dict:
    """Return the two cuts by name: the share of the work on the first device, and the speed-up over one device.

    The planned one also has ``peak``: microbatches -> schedule -> MiB of every device.
    """
    options = {"batch": BATCH, "gpu_memory": "40GiB", "microbatches": MICROBATCHES, "schedule": "1F1B"}
    chosen = plan(model="resnet101", stages=2, cost="a100", **options)
    case, rows = chosen.case, {}
    costs = [cost.both for cost in case.costs(BATCH // MICROBATCHES)]
    for name, candidate in (("usual", chosen.usual()), ("planned", chosen.best)):
        (point,) = candidate.points  # the first block of the second stage
        speedup = case.one_device_seconds / candidate.step_time
        rows[name] = {"share": sum(costs[:point]) / sum(costs), "speedup": speedup}
    rows["planned"]["peak"] = {M: {name: peak_memory(chosen, name, M) for name in SCHEDULES} for M in COMPARED}
    return rows


def peak_memory(chosen, schedule, microbatches) -> list[int]:
    """Return the peak of every device in MiB, for the planned cut."""
    case, candidate = replace(chosen.case, optimizer="momentum"), chosen.best
    candidate = candidate._replace(schedule=schedule, microbatches=microbatches)
    return [round(device.peak / MIB) for device in planner.devices(case, candidate)]


if __name__ == "__main__":
    RunLog(sys.argv[1], True).finish({"cuts": cuts()})
