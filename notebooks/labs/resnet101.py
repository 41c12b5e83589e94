"""What the planner says of a ResNet-101 on two GPUs: where to cut it, and how much memory each schedule needs.

    python -m mpdemo.labs.resnet101 runs/resnet101

It needs no GPU, and no process group; it writes ``summary.json`` in the folder. Its peak memory and its time are too
much for a login node, so it is a job. Taught in notebooks/05_pipeline.ipynb.
"""

import sys
from dataclasses import replace

from mpdemo.plan import planner
from mpdemo.plan.command import plan
from mpdemo.plan.report import answer
from mpdemo.plan.subject import MIB
from mpdemo.training.log import RunLog

BATCH, IMAGE_SIZE, MICROBATCHES = 128, 224, 8
COMPARED = (8, 16, 32)  # microbatches whose memory is estimated


def predictions() -> dict:
    """Return the plan's text, and the two cuts side by side.

    Returns
    -------
    dict
        ``text``; and ``cuts``, by name: ``point`` (the first block of the second stage), ``share`` (of the work on the
        first device), ``speedup`` (over one device) and ``peak`` (microbatches -> schedule -> MiB of every device).
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
    costs = [cost.both for cost in chosen.case.costs(BATCH // MICROBATCHES)]
    cuts = {}
    for cut, candidate in (("usual", chosen.usual()), ("planned", chosen.best)):
        (point,) = candidate.points
        peaks = {
            count: {name: peak_memory(chosen.case, candidate, name, count) for name in ("GPipe", "1F1B")}
            for count in COMPARED
        }
        share = sum(costs[:point]) / sum(costs)
        cuts[cut] = {
            "point": point,
            "share": share,
            "speedup": chosen.case.one_device_seconds / candidate.step_time,
            "peak": peaks,
        }
    return {"text": answer(chosen)[0], "cuts": cuts}


def peak_memory(case, candidate, schedule, microbatches) -> list[int]:
    """Return the peak of every device in MiB, for the cut of a candidate."""
    candidate = candidate._replace(schedule=schedule, microbatches=microbatches)
    return [round(device.peak / MIB) for device in planner.devices(replace(case, optimizer="momentum"), candidate)]


if __name__ == "__main__":
    RunLog(sys.argv[1], True).finish(predictions())
