"""Pipelines of the course model measured side by side. A job starts this in two processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.pipeline runs/lab norms splits schedules

Every process runs the named functions; rank 0 writes all results to ``summary.json`` in the folder. The timelines go to
one folder per variant, below it. Taught in notebooks/31_microbatches.ipynb and 32_in_anger.ipynb.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from mpdemo.measure import paired, timeline
from mpdemo.measure.compare import Comparison, model_and_batch, write_result
from mpdemo.measure.trial import Trial, relative_difference
from mpdemo.settings import Settings, equal_cut
from mpdemo.settings.schedules import SCHEDULES
from mpdemo.world.collectives import gather_objects, rest
from mpdemo.world.processes import end

COURSE = Settings(rung="pipeline", timeline=True)
NAIVE = replace(COURSE, rung="model_parallel", schedule="1F1B", microbatches=None)


def variant(schedule, microbatches=4) -> Settings:
    """Return the course model's pipeline with another schedule, cut into equal stages."""
    cut = equal_cut(2 * SCHEDULES[schedule].stages_per_rank)
    return replace(COURSE, schedule=schedule, microbatches=microbatches, cut=cut)


def norms(world) -> dict:
    """Return the largest relative difference of a pipelined ConvNet's gradients from one device's, over all ranks.

    With group norm and with batch norm; the device takes the whole batch, or the same microbatches.
    """

    def gradients(settings):
        return Trial(replace(settings, timeline=False), world, *model_and_batch(settings)).gradients()

    differences = {}
    for norm in ("group", "batch"):
        single = Settings(rung="single", model="convnet", norm=norm)
        piped = gradients(replace(single, rung="pipeline", schedule="1F1B", microbatches=4))
        for name, microbatches in (("whole batch", 1), ("same microbatches", 4)):
            reference = gradients(replace(single, microbatches=microbatches))
            differences[f"{norm} norm, {name}"] = relative_difference(piped, reference)
    ranks = gather_objects(differences)
    return {name: max(rank[name] for rank in ranks) for name in differences}


def splits(world, out) -> dict:
    """Return the seconds of the steps of GPipe on two equal stages, for every number of microbatches."""
    return record_all(
        world, out, {1: NAIVE} | {count: variant("GPipe", count) for count in (2, 4, 8, 16, 32)}
    )


def schedules(world, out) -> dict:
    """Return the seconds of the steps of every schedule with four microbatches."""
    return record_all(world, out, {"naive": NAIVE} | {name: variant(name) for name in SCHEDULES})


def record_all(world, out, variants) -> dict:
    """Time all variants (Settings by name) alternately, and save their timelines in folders of `out`.

    Returns
    -------
    dict
        By name, lists with one number per round, in seconds: ``measured``; ``simulated``, the schedule with the
        operations' times; ``computing``, the busiest rank's operations without any waiting; and ``idle``, the
        simulated share.
    """
    comparison = Comparison(world, *model_and_batch(COURSE))
    for name, settings in variants.items():
        comparison.add(name, settings)
    comparison.run(paired.ROUNDS, warmup=1)
    for name, trial in comparison.trials.items():
        trial.run.recorder.save(Path(out, str(name)))
    rest()  # all ranks have written
    return {str(name): seconds_of(Path(out, str(name)), settings) for name, settings in variants.items()}


def seconds_of(folder, settings) -> dict:
    """Return what `record_all` does, of one variant."""
    schedule = settings.schedule if settings.microbatches else "GPipe"
    rounds = [seconds_of_step(step, schedule) for step in timeline.load(folder)[-paired.ROUNDS :]]
    return {kind: [seconds[kind] for seconds in rounds] for kind in rounds[0]}


def seconds_of_step(step, schedule) -> dict:
    """Return what `record_all` does, of one step."""
    busy = [0.0, 0.0]  # s that each rank computes
    for row in step:
        busy[row["rank"]] += (row["end"] - row["start"]) * (row["kind"] in timeline.COMPUTES)
    ideal = timeline.predict([step], schedule)
    seconds = {"measured": timeline.step_time(step), "simulated": ideal.step_time, "computing": max(busy)}
    return seconds | {"idle": ideal.idle_share}


if __name__ == "__main__":
    out, *names = sys.argv[1:]
    functions = {
        "norms": norms,
        "splits": partial(splits, out=out),
        "schedules": partial(schedules, out=out),
    }
    end(write_result(out, lambda world: {name: gather_objects(functions[name](world)) for name in names}))
