"""The planner's choice of cut, schedule and number of microbatches against what else one could have chosen.

All choices are run a few times; then the planner's and the fastest others run against each other again, round after
round: the fastest of many short runs is mostly the luckiest. Part of ``python -m mpdemo bench``.
"""

import torch

from mpdemo import models
from mpdemo.bench.pipelines import PIPELINE, pipeline_rows
from mpdemo.plan import SCHEDULES, cost
from mpdemo.plan.cut import move_border
from mpdemo.plan.footprint import footprints
from mpdemo.plan.planner import Job, candidates, choose, evaluate
from mpdemo.settings import Settings
from mpdemo.training.measure import gather_objects

COUNTS = (2, 4, 8)  # microbatches to choose from
HEATS, FINALISTS = 3, 4  # rounds in which all run; others that run against the planner's choice afterwards


def planner(world, rounds, model="resnet50", size=128, batch=32):
    """Return a row for each finalist, the planner's choice first; speed-ups are over that one."""
    base = Settings(model=model, image_size=size, batch_size=batch, **PIPELINE)
    net = models.build(model, classes=1000, channels=3, image_size=size)
    sizes = [batch // count for count in COUNTS]
    measured = cost.measure(net, torch.randn(batch, 3, size, size), sizes) if world.rank == 0 else None
    job = Job(footprints(model, size), gather_objects(measured)[0], world.world_size, batch)
    tried = choices(job)
    variants = [(c.schedule, c.microbatches, ",".join(map(str, c.points))) for c in tried]
    rows = pipeline_rows(world, HEATS, base, variants)
    order = sorted(range(1, len(rows)), key=lambda i: -rows[i]["speedup"])
    finalists = [0, *order[:FINALISTS]]
    rows = pipeline_rows(world, 2 * rounds, base, [variants[i] for i in finalists])
    keys = ("model", "cut", "schedule", "microbatches", "step_seconds", "speedup", "speedup_quartiles")
    return [
        {"choice": "other" if i else "planner", "of": len(tried), **{k: row[k] for k in keys}}
        | {"planned_seconds": tried[i].step_time}
        for i, row in zip(finalists, rows, strict=True)
    ]


def choices(job):
    """Return the planner's candidate, the best cut of every other schedule and M, and cuts beside the planner's."""
    found = candidates(job, [name for name in SCHEDULES if name != "naive"], COUNTS)
    best = choose(found, job.limit)
    cuts = [move_border(best.points, i, by, len(job.blocks)) for i in range(len(best.points)) for by in (-1, 1)]
    beside = [evaluate(job, best.schedule, best.microbatches, points) for points in cuts if points is not None]
    return [best, *(c for c in found if c is not best), *beside]
