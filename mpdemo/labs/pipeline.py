"""Pipelines of the story's model measured side by side. A job starts this in two processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.pipeline runs/lab equality splits schedules cuts one_process

Every process runs the named functions; rank 0 writes all results to ``summary.json`` in the folder.
Taught in notebooks/05_pipeline.ipynb.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from mpdemo import data, models
from mpdemo.labs.harness import Comparison, run_lab
from mpdemo.labs.ladder import model_and_batch
from mpdemo.trial import Trial
from mpdemo.notebook.story import equal_cut, story
from mpdemo.schedules import SCHEDULES
from mpdemo.settings import Settings
from mpdemo.trial import relative_difference
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

ROUNDS = 3
STORY = Settings(**story("pipeline"))


def variant(schedule, microbatches=4, cut=None) -> Settings:
    """Return the story's pipeline with another schedule, cut into equal stages unless a cut is given."""
    stages = 2 * SCHEDULES[schedule].stages_per_rank
    count = 1 if schedule == "naive" else microbatches
    return replace(STORY, schedule=schedule, microbatches=count, cut=cut or equal_cut(stages))


def equality(world) -> dict:
    """Largest relative difference of the gradients of one batch from the single device's, over all ranks, by name.

    Of every schedule; and of a ConvNet with group norm and with batch norm, against the single device that takes the
    whole batch, and against the one that takes it in the same microbatches.
    """
    differences = {}
    model, batch = model_and_batch(STORY)
    single = Settings(rung="single", model=STORY.model, batch_size=STORY.batch_size)
    reference = Trial(single, world, model, batch).gradients()
    for name in SCHEDULES:
        differences[name] = relative_difference(Trial(variant(name), world, model, batch).gradients(), reference)
    batch = [tensor[:64] for tensor in data.load("digits").train.tensors]
    for norm in ("group", "batch"):
        model, parts = models.build("convnet", norm=norm), Settings(rung="single", norm=norm, batch_size=64)
        gradients = Trial(replace(parts, rung="pipeline", microbatches=4), world, model, batch).gradients()
        for name, microbatches in (("whole batch", 1), ("same microbatches", 4)):
            reference = Trial(replace(parts, microbatches=microbatches), world, model, batch).gradients()
            differences[f"{norm} norm, {name}"] = relative_difference(gradients, reference)
    ranks = gather_objects(differences)
    return {name: max(rank[name] for rank in ranks) for name in differences}


def splits(world, out) -> dict:
    """GPipe on two equal stages: seconds per step for every number of microbatches, one number per round.

    The timelines go to one folder per number of microbatches, in `out`: with the time of a microbatch on each stage.
    """
    return record_all(world, out, {m: variant("gpipe" if m > 1 else "naive", m) for m in (1, 2, 4, 8, 16, 32)})


def schedules(world, out) -> dict:
    """Every schedule with four microbatches: seconds per step, one number per round; timelines as in `splits`."""
    return record_all(world, out, {name: variant(name) for name in SCHEDULES})


def cuts(world, out) -> dict:
    """1F1B on stages of two and six blocks, and of four and four: seconds per step; timelines as in `splits`."""
    return record_all(world, out, {"2 and 6": variant("1f1b", cut="block.1"), "4 and 4": variant("1f1b")})


def record_all(world, out, variants) -> dict:
    """Time all variants (Settings by name) in turn and save their timelines in folders of `out`; seconds per step."""
    comparison = Comparison(world, *model_and_batch(STORY))
    for name, settings in variants.items():
        comparison.add(name, settings)
    comparison.run(ROUNDS, warmup=1)
    for name, trial in comparison.trials.items():
        trial.rung.recorder.save(Path(out, str(name)))
    return comparison.seconds


def one_process(world) -> dict:
    """One and four microbatches on two devices that one process drives: seconds per step, one number per round.

    Nothing is measured where a process sees a single GPU (``srun --gpus-per-task``).
    """
    if world.device.type == "cuda" and torch.cuda.device_count() < 2:
        return {}
    comparison = Comparison(world, *model_and_batch(STORY))
    schedule = Settings(rung="pipeline").schedule
    four = replace(STORY, form="one-process", devices=2, schedule=schedule, cut=equal_cut(2), timeline=False)
    comparison.add(1, replace(four, rung="model_parallel", microbatches=None))
    comparison.add(4, four)
    comparison.run(2 * ROUNDS, warmup=1)
    return comparison.seconds


if __name__ == "__main__":
    experiments = {function.__name__: function for function in (equality, one_process)}
    experiments |= {function.__name__: partial(function, out=sys.argv[1]) for function in (splits, schedules, cuts)}
    end(run_lab(experiments, sys.argv[1], sys.argv[2:]))
