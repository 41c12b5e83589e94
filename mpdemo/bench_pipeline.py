"""The pipeline measurements of ``python -m mpdemo bench``: schedules and cuts against naive model parallelism.

Each row holds what was measured, what the simulation of the schedule says with the stage times measured beside it,
and how far apart the two are.
"""

import statistics
from dataclasses import replace

import torch
from tqdm import tqdm

from mpdemo import models, trace
from mpdemo.bench_parts import make
from mpdemo.contest import Contest, stage_costs
from mpdemo.measure import gather_objects
from mpdemo.plan import SCHEDULES, cost, simulate
from mpdemo.plan.footprint import footprints
from mpdemo.plan.planner import Job, candidates, choose
from mpdemo.settings import Settings

PIPELINE = {"rung": "pipeline", "form": "per-device", "timeline": True}
PIPELINES = (
    ("convstack", 32, 32, (2, 4, 8, 16)),  # model, pixels a side, batch, microbatch counts
    ("transformer", 28, 64, (2, 4, 8, 16)),
)
HALVES, QUARTERS = "block.3", "block.1,block.3,block.5"  # equal stages of eight equal blocks


def pipeline(world, rounds):
    """Every schedule and microbatch count against naive model parallelism and against its simulation."""
    rows = []
    for model, size, batch, counts in PIPELINES:
        base = Settings(model=model, image_size=size, batch_size=batch, norm="group", **PIPELINE)
        variants = [("naive", 1, HALVES)]
        for m in counts:
            variants += [("gpipe", m, HALVES), ("1f1b", m, HALVES)]
            variants += [(name, m, QUARTERS) for name in ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")]
        rows += pipeline_rows(world, rounds, base, variants)
    return rows + two_cuts(world, rounds)


def two_cuts(world, rounds):
    """ResNet-101: the cut after layer2, as in the courses this one grew from, against the balanced one."""
    base = Settings(model="resnet101", image_size=128, batch_size=32, **PIPELINE)
    variants = [(name, m, place) for place in ("layer2.3", "layer3.6") for name, m in (("naive", 1), ("1f1b", 8))]
    return pipeline_rows(world, rounds, base, variants)


def pipeline_rows(world, rounds, base, variants):
    """Measure all variants (schedule, M, cut) of one model in one contest; a row each, the first is the naive one."""
    contest, rungs = Contest(world), []
    for schedule, microbatches, place in variants:
        settings = replace(base, schedule=schedule, microbatches=microbatches, cut=place)
        rung, settings, step = make(settings, world)
        rungs.append((f"{schedule} M={microbatches} cut={place}", rung, settings))
        contest.add(rungs[-1][0], recorded(rung, step))
    with tqdm(total=rounds, desc=base.model, unit="round", disable=world.rank > 0) as bar:
        contest.run(rounds, each_round=lambda done: bar.update(done - bar.n))
    return [row_of(world, contest, name, rung, settings, rungs[0][0]) for name, rung, settings in rungs]


def recorded(rung, step):
    """The step, with its timeline recorded."""

    def run():
        with rung.recorder.step():
            step()

    return run


def row_of(world, contest, name, rung, settings, naive):
    """One line of the table: measured, simulated, and how far apart. All ranks must call this."""
    costs = stage_costs(rung, [i for i, owner in enumerate(rung.owners) if owner == world.rank])
    costs = [costs[i] for i in range(len(costs))]
    weight = [c.weight / (c.input + c.weight) for c in costs]
    split = SCHEDULES[settings.schedule].splits_backward
    backward = [c.input + c.weight if split else c.backward for c in costs]
    forward = [c.forward for c in costs]
    predicted = simulate(settings.schedule, forward, backward, settings.microbatches, world.world_size, weight)
    steps = [trace.merge(list(parts)) for parts in zip(*gather_objects(rung.recorder.steps), strict=True)][2:]
    step_time = statistics.median(trace.step_time(step) for step in steps)
    speedup = contest.ratio(naive, name)
    seconds = sorted(contest.seconds[name])
    return {
        "model": settings.model,
        "cut": settings.cut,
        "schedule": settings.schedule,
        "processes": world.world_size,
        "microbatches": settings.microbatches,
        "step_seconds": statistics.median(seconds),
        "step_quartiles": [seconds[len(seconds) // 4], seconds[(3 * len(seconds)) // 4]],
        "speedup_over_naive": speedup[0],
        "simulated_seconds": predicted.step_time,
        "fraction_of_bound": predicted.step_time / step_time,
        "measured_idle_share": statistics.median(trace.idle_share(step) for step in steps),
        "predicted_idle_share": predicted.idle_share,
    }


def planner(world, rounds, model="resnet18", size=64, batch=32):
    """The planner's choice of cut, schedule and M against the best of all that were tried."""
    base = Settings(model=model, image_size=size, batch_size=batch, **PIPELINE)
    blocks = models.build(model, classes=1000, channels=3, image_size=size)
    sizes = [batch // m for m in (1, 2, 4, 8)]
    costs = gather_objects(cost.measure(blocks, torch.randn(batch, 3, size, size), sizes))[0]  # all measure at once
    job = Job(footprints(model, size), costs, world.world_size, batch)
    found = [c for c in candidates(job, microbatches=[2, 4, 8]) if c.schedule != "naive"]
    best = choose(found, job.limit)
    tried = {(c.schedule, c.microbatches, tuple(c.points)): None for c in [best, *found]}
    tried |= {(best.schedule, best.microbatches, (p,)): None for p in range(1, len(blocks)) if len(best.points) == 1}
    variants = [("naive", 1, str(len(blocks) // 2))]
    variants += [(name, m, ",".join(map(str, points))) for name, m, points in tried]
    rows = pipeline_rows(world, rounds, base, variants)[1:]
    fastest = min(rows, key=lambda row: row["step_seconds"])
    choices = [("planner", rows[0]), ("best of all", fastest), ("slowest", max(rows, key=lambda r: r["step_seconds"]))]
    keys = ("model", "cut", "schedule", "microbatches", "step_seconds", "step_quartiles")
    return [
        {"choice": name, **{k: row[k] for k in keys}, "over_best": row["step_seconds"] / fastest["step_seconds"]}
        for name, row in choices
    ] + [{"choice": f"tried: {len(rows)}", **dict.fromkeys(keys), "over_best": None}]
