"""The pipeline measurements of ``python -m mpdemo bench``: schedules, cuts and the planner's choice."""

import time
from dataclasses import replace
from statistics import median

from mpdemo.labs.harness import WARMUP, Comparison, quartiles
from mpdemo.labs.machine import measure
from mpdemo.trial import build_model, random_batch, recorded_steps
from mpdemo.plan import SCHEDULES
from mpdemo.plan.cut import move_boundary
from mpdemo.plan.footprint import footprints
from mpdemo.plan.planner import Workload, candidates, choose, evaluate
from mpdemo.settings import Settings
from mpdemo.timeline import read
from mpdemo.timeline.record import Recorder
from mpdemo.world.collectives import gather_objects
from mpdemo.world.cores import shared_cores

# model, pixels per side, batch: large enough for operations of 5 ms or more, since sending one takes 0.5 ms
PIPELINES = (("convstack", 32, 64), ("transformer", 28, 256))
HALVES, QUARTERS = "block.3", "block.1,block.3,block.5"  # equal stages of eight equal blocks
COUNTS = (2, 4, 8)  # microbatches for the planner to choose from
HEATS, FINALISTS = 3, 4  # rounds in which all choices run; others that run against the planner's choice afterwards


def pipeline_settings(**settings) -> Settings:
    """Settings of a pipeline that records what it does."""
    return Settings(rung="pipeline", timeline=True, **settings)


def pipeline(world, rounds):
    """Every schedule and number of microbatches against naive model parallelism and its simulation; then two cuts."""
    rows = []
    for model, size, batch in PIPELINES:
        base = pipeline_settings(model=model, image_size=size, batch_size=batch, norm="group")
        variants = [("naive", 1, HALVES)]
        for count in (2, 4, 8, 16):
            variants += [(schedule, count, cut) for schedule, cut in equal_cuts().items()]
        rows += pipeline_rows(world, rounds, base, variants)
    # ResNet-101: the cut after layer2, as in the courses that this one grew from, against the balanced one
    base = pipeline_settings(model="resnet101", image_size=128, batch_size=32)
    cuts = [(name, m, cut) for cut in ("layer2.3", "layer3.6") for name, m in (("naive", 1), ("1f1b", 8))]
    return rows + pipeline_rows(world, rounds, base, cuts)


def hybrid(world, rounds):
    """Two replicas of a pipeline over two processes, with every schedule, against the single device and its simulation.

    A second time with larger operations, of which the messages are a smaller part. Four processes may share two cores;
    the simulation then knows it (`mpdemo.timeline.read.predict_seconds`).
    """
    rows, (model, size, batch) = [], PIPELINES[1]
    variants = [(schedule, 4, cut) for schedule, cut in equal_cuts().items()]
    for images in (batch, 4 * batch):
        single = Settings(rung="single", model=model, image_size=size, batch_size=images, norm="group")
        base = replace(single, rung="hybrid", replicas=2, timeline=True)
        rows += pipeline_rows(world, rounds, base, variants, against=single)
    return rows


def equal_cuts() -> dict:
    """The cut of eight equal blocks into equal stages, for every schedule that overlaps."""
    return {s: HALVES if SCHEDULES[s].stages_per_rank == 1 else QUARTERS for s in SCHEDULES if s != "naive"}


def pipeline_rows(world, rounds, base, variants, against=None):
    """Measure all variants (schedule, M, cut) of one model in turn; one row each.

    They are compared with the first one, or with the settings `against`.
    """
    comparison, first = Comparison(world), variants[0]
    if against:
        first = against.rung
        comparison.add(first, against)
    for schedule, microbatches, cut in variants:
        settings = replace(base, schedule=schedule, microbatches=microbatches, cut=cut)
        comparison.add((schedule, microbatches, cut), settings)
    comparison.run(rounds, title=base.model)
    recording, cores = recording_seconds(world.device), shared_cores()
    return [pipeline_row(comparison, name, first, recording, cores) for name in variants]


def pipeline_row(comparison, name, first, recording, cores):
    """One row: measured, simulated with the stage times of the same steps, and how far apart. For all ranks to call.

    What lies between the two is communication, and the library's work between two operations.
    """
    trial, seconds = comparison.trials[name], comparison.median(name)
    steps, schedule = recorded_steps(trial)[WARMUP:], trial.settings.schedule
    simulated = [read.predict_seconds(step, schedule, cores) for step in steps]
    shares = [bound / read.step_time(step) for bound, step in zip(simulated, steps, strict=True)]
    speedup, *speedup_quartiles = comparison.ratio(first, name)
    return {
        "model": trial.settings.model,
        "batch": trial.settings.batch_size,
        "cut": trial.settings.cut,
        "schedule": trial.settings.schedule,
        "processes": comparison.world.world_size,
        "microbatches": trial.settings.microbatches,
        "step_seconds": seconds,
        "step_quartiles": quartiles(comparison.seconds[name]),
        "speedup": speedup,  # over what is compared with
        "speedup_quartiles": speedup_quartiles,
        "simulated_seconds": median(simulated),
        "fraction_of_bound": median(shares),
        "fraction_quartiles": quartiles(shares),
        "measured_idle_share": median(read.idle_share(step) for step in steps),
        "predicted_idle_share": median(read.predict([step], schedule).idle_share for step in steps),
        "recorder_share": len(trial.rung.recorder.steps[0]["events"]) * recording / seconds,
    }


def recording_seconds(device, repeats=10_000) -> float:
    """Seconds that recording one operation takes, measured around an operation that does nothing."""
    recorder = Recorder(0, device)
    with recorder.step():
        begin = time.perf_counter()
        for number in range(repeats):
            with recorder.operation("F", 0, number):
                pass
        return (time.perf_counter() - begin) / repeats


def planner(world, rounds, model="resnet50", size=128, batch=32):
    """The planner's choice against what else one could have chosen; one row for each finalist, the choice first.

    All choices are run a few times; then the planner's and the fastest others run against each other again: the
    fastest of many short runs is mostly the luckiest.
    """
    base = pipeline_settings(model=model, image_size=size, batch_size=batch)
    sizes, (images, _) = [batch // count for count in COUNTS], random_batch(base)
    speeds = gather_objects(measure(world, dict.fromkeys(sizes, build_model(base)), images, "momentum").speeds())[0]
    tried = choices(Workload(footprints(model, size), ranks=world.world_size, batch=batch, **speeds))
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


def choices(workload):
    """Return the planner's candidate, the best cut of every other schedule and M, and cuts beside the planner's."""
    others = candidates(workload, [name for name in SCHEDULES if name != "naive"], COUNTS)
    best, count = choose(others, workload.limit), len(workload.blocks)
    moved = [move_boundary(best.points, i, by, count) for i in range(len(best.points)) for by in (-1, 1)]
    beside = [evaluate(workload, best.schedule, best.microbatches, points) for points in moved if points is not None]
    return [best, *(candidate for candidate in others if candidate is not best), *beside]
