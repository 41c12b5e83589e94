"""Pipelines measured side by side: microbatches, schedules, cuts, norms. A job starts this in several processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.pipeline runs/lab splits norms schedules cuts
    python -m mpdemo.labs.pipeline runs/lab one_process

Every process runs the named functions; rank 0 writes all results to ``summary.json`` in the folder.
Taught in notebooks/05_pipeline.ipynb.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from mpdemo import data, models
from mpdemo.labs.harness import Comparison, run_lab
from mpdemo.labs.trial import Trial, build_model, random_batch
from mpdemo.plan import SCHEDULES
from mpdemo.plan.cost import measure
from mpdemo.plan.cut import balanced_cut
from mpdemo.settings import Settings
from mpdemo.training.measure import relative_difference
from mpdemo.world.collectives import gather_objects

ROUNDS = 3
RESNET = {
    "cpu": {"model": "resnet18", "image_size": 64, "batch_size": 32, "norm": "group"},
    "cuda": {"model": "resnet50", "image_size": 224, "batch_size": 128, "norm": "group"},
}
EQUAL_BLOCKS = {  # enough work that a message, and on a GPU the launch of a kernel, is short beside it
    "cpu": {"model": "transformer", "image_size": 28, "batch_size": 128},
    "cuda": {"model": "convstack", "image_size": 128, "batch_size": 64, "norm": "group"},
}
TO_CUT = {
    "cpu": {"model": "resnet50", "image_size": 64, "batch_size": 32},
    "cuda": {"model": "resnet101", "image_size": 224, "batch_size": 64},
}


def splits(world, out):
    """A ResNet-18 cut in two, with GPipe: seconds per step for every number of microbatches, one number per round.

    The timelines go to one folder per number of microbatches, in `out`: with the time of a microbatch on each stage.
    """
    base = Settings(rung="pipeline", timeline=True, **RESNET[world.device.type])
    return record_all(world, out, {m: replace(base, **gpipe(m)) for m in (1, 2, 4, 8, 16)})


def gpipe(microbatches) -> dict:
    """Settings of a GPipe with so many microbatches; with one it is naive model parallelism."""
    return {"schedule": "gpipe" if microbatches > 1 else "naive", "microbatches": microbatches}


def record_all(world, out, variants):
    """Time all variants (Settings by name) in turn and save their timelines in folders of `out`; seconds per step."""
    comparison = Comparison(world)
    for name, settings in variants.items():
        comparison.add(name, settings)
    comparison.run(ROUNDS, warmup=1)
    for name, trial in comparison.trials.items():
        trial.rung.recorder.save(Path(out, str(name)))
    return comparison.seconds


def one_process(world):
    """The same model and batch, two devices driven by one process: seconds per step, one number per round.

    Returns
    -------
    dict
        ``device``, ``seconds`` for each number of microbatches.
    """
    base = Settings(rung="model_parallel", form="one-process", devices=2, **RESNET[world.device.type])
    comparison = Comparison(world)
    for count in (1, 4, 8):
        comparison.add(count, replace(base, rung="pipeline", microbatches=count) if count > 1 else base)
    comparison.run(ROUNDS, warmup=1)
    return {"device": world.device.type, "seconds": comparison.seconds}


def norms(world, batch=128, microbatches=4):
    """How far a pipeline's gradients are from the single device's, with the whole batch and with the same parts."""
    images_and_labels = [tensor[:batch] for tensor in data.load("digits").train.tensors]
    result = {}
    for norm in ("group", "batch"):
        model, parts = models.build("convnet", norm=norm), Settings(rung="single", norm=norm, microbatches=microbatches)
        variants = {
            "pipeline": replace(parts, rung="pipeline"),
            "parts": parts,
            "whole": replace(parts, microbatches=1),
        }
        gradients = {
            name: Trial(settings, world, model, images_and_labels).gradients() for name, settings in variants.items()
        }
        result[norm] = {
            "single, same microbatches": relative_difference(gradients["pipeline"], gradients["parts"]),
            "single, whole batch": relative_difference(gradients["pipeline"], gradients["whole"]),
        }
    return result


def schedules(world, out, microbatches=4, halves="block.3", quarters="block.1,block.3,block.5"):
    """Every schedule on a transformer of equal blocks: seconds per step, one number per round.

    The timelines go to one folder per schedule, in `out`.
    """
    base = Settings(rung="pipeline", timeline=True, **EQUAL_BLOCKS[world.device.type])
    variants = {}
    for name, schedule in SCHEDULES.items():
        cut, count = halves if schedule.stages_per_rank == 1 else quarters, 1 if name == "naive" else microbatches
        variants[name] = replace(base, cut=cut, schedule=name, microbatches=count)
    return record_all(world, out, variants)


def cuts(world, microbatches=4):
    """A ResNet cut after layer2, and where its measured blocks balance: seconds per step, one number per round.

    Returns
    -------
    dict
        ``names`` of the blocks; ``costs``, seconds of each for one microbatch, ``forward`` and ``backward``;
        ``points`` and ``seconds`` for each of the two cuts: the first block of the second stage, and the step.
    """
    settings = Settings(rung="pipeline", microbatches=microbatches, **TO_CUT[world.device.type])
    model, size = build_model(settings), settings.batch_size // microbatches
    sample, _ = random_batch(replace(settings, batch_size=size))
    measured = measure(model.to(world.device), sample.to(world.device), [size])[size]
    costs = gather_objects(measured)[0]  # rank 0's: all ranks must cut alike
    after_layer2 = models.resolve_cut(model.names, "layer2.3", 2)
    points = {"after layer2": after_layer2, "balanced": balanced_cut([cost.both for cost in costs], 2)}
    comparison = Comparison(world)
    for name, (point,) in points.items():
        comparison.add(name, replace(settings, cut=str(point)))
    comparison.run(ROUNDS, warmup=1)
    seconds = {"forward": [cost.forward for cost in costs], "backward": [cost.backward for cost in costs]}
    return {
        "model": settings.model,
        "names": model.names,
        "costs": seconds,
        "points": points,
        "seconds": comparison.seconds,
    }


if __name__ == "__main__":
    experiments = {function.__name__: function for function in (one_process, norms, cuts)}
    experiments |= {function.__name__: partial(function, out=sys.argv[1]) for function in (splits, schedules)}
    sys.exit(run_lab(experiments, sys.argv[1], sys.argv[2:]))
