"""Whether a plan holds: memory and messages of real steps in two processes, beside what is planned of them.

Every process takes part; rank 0 writes ``summary.json`` in the folder argv[1]. Nothing is timed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests
from programs.real_step import measured, pipelined

from mpdemo.tools.plan import own, own_scaling
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.request import PlanRequest
from mpdemo.training.log import RunLog
from mpdemo.world.env import join_world

MODELS = Path(__file__).parents[1] / "programs" / "llama.py"
BATCH, LENGTH = 4, 256
BF16, TWICE = {"bf16": True}, {"checkpointing": True}
CASES = [
    {"name": "tied_20m"},
    {"name": "untied_20m", **TWICE},
    {"name": "tied_20m", **BF16},
    {"name": "untied_20m", **BF16, **TWICE},
    {"name": "bf16_20m"},
    {"name": "tied_20m", "how": "fsdp"},
    {"name": "untied_20m", "how": "fsdp", **BF16, **TWICE},
    {"name": "untied_20m", "how": "tensor"},
    {"name": "tied_20m", "how": "tensor", **TWICE},
]
PIPELINE = {"name": "untied_20m", "batch": 16, "length": LENGTH}


def plan_of(name, batch, **more):
    """Return a request for one of the models."""
    return PlanRequest(OwnModel(f"{MODELS}:{name}", (LENGTH,), tokens=True), batch, **more)


def planned(name, how=None, bf16=False, **way) -> dict:
    """Return what a plan says of a case, as `measured` does."""
    way["half"] = ("bf16" if how else "autocast") if bf16 else ""
    if how:
        way["shards" if how == "fsdp" else "tensor"] = 2
    step = own.steps_of(plan_of(name, BATCH), BATCH, **way).at(BATCH)
    return {
        "peak": float(step.peak),
        "sent": {kind: int(bytes_) for kind, (bytes_, _) in step.sent.items()},
    }


def stages(precision) -> tuple:
    """Return the planned peak of each stage of `PIPELINE`, and how it is split and computed."""
    request = plan_of(PIPELINE["name"], PIPELINE["batch"], devices=2)
    found, half = own.pipeline(request, precision), own.half_of(precision)
    size = request.batch // found.parts
    steps = own.steps_of(request, size, held=True, half=half, stage=half == "bf16")
    cut = own.cut(own_scaling.chain(steps, size, request.roof(precision)), 2)
    return found.stages, {"microbatches": found.parts, "stages": cut, "bf16": half == "bf16"}


def main(out):
    """Plan first, since a plan has a process group of its own; then count in every process."""
    pipelines = [stages(precision) for precision in ("fp32", "bf16")]
    rows = [{"case": case, "planned": planned(**case)} for case in CASES]
    with join_world() as world:
        for row in rows:
            row["counted"] = measured(batch=BATCH, length=LENGTH, **row["case"])
        for peaks, how in pipelines:
            for stage, (plan, real) in enumerate(zip(peaks, pipelined(**PIPELINE, **how), strict=True)):
                counts = {
                    "planned": {"peak": float(plan), "sent": {}},
                    "counted": {"peak": real, "sent": {}},
                }
                rows.append({"case": {"stage": stage, "bf16": how["bf16"]}} | counts)
    RunLog(out, world.rank == 0).finish({"rows": rows})


if __name__ == "__main__":
    main(sys.argv[1])
