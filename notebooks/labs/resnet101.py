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

BATCH, IMAGE_SIZE, MICROBATCHES = 128, 224, 8
COMPARED, SCHEDULES = (8, 16, 32), ("GPipe", "1F1B")  # microbatches and schedules whose memory is estimated


def predictions() -> dict:
    """Return the two cuts side by side.

    Returns
    -------
    dict
        ``cuts``, by name: ``point`` (the first block of the second stage), ``share`` (of the work on the first device),
        ``speedup`` (over one device) and ``peak`` (microbatches -> schedule -> MiB of every device).
    """
    chosen = plan(
        model="resnet101",
        stages=2,
        batch=BATCH,
        gpu_memory="40GiB",
        cost="a100",
        microbatches=MICROBATCHES,
        schedule="1F1B",
    )
    case, cuts = chosen.case, {}
    costs = [cost.both for cost in case.costs(BATCH // MICROBATCHES)]
    for cut, candidate in (("usual", chosen.usual()), ("planned", chosen.best)):
        (point,) = candidate.points
        peaks = {count: {name: peak_memory(case, candidate, name, count) for name in SCHEDULES} for count in COMPARED}
        share = sum(costs[:point]) / sum(costs)
        cuts[cut] = {
            "point": point,
            "share": share,
            "speedup": case.one_device_seconds / candidate.step_time,
            "peak": peaks,
        }
    return {"cuts": cuts}


def peak_memory(case, candidate, schedule, microbatches) -> list[int]:
    """Return the peak of every device in MiB, for the cut of a candidate."""
    candidate = candidate._replace(schedule=schedule, microbatches=microbatches)
    return [round(device.peak / MIB) for device in planner.devices(replace(case, optimizer="momentum"), candidate)]


if __name__ == "__main__":
    RunLog(sys.argv[1], True).finish(predictions())
