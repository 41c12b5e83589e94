"""Pipelines measured side by side: microbatches, schedules, cuts, norms. A job starts this in several processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.pipeline runs/lab splits norms schedules cuts
    python -m mpdemo.labs.pipeline runs/lab one_process

Every process runs the named functions; rank 0 writes what all of them returned to ``summary.json`` in the folder.
Taught in notebooks/05_pipeline.ipynb.
"""

import copy
import sys
import time
from functools import partial
from pathlib import Path

import torch

from mpdemo import data, models, parallel
from mpdemo.bench.parts import make
from mpdemo.labs.contest import Contest
from mpdemo.labs.toys import run
from mpdemo.plan import SCHEDULES
from mpdemo.plan.cost import measure
from mpdemo.plan.cut import balanced_cut
from mpdemo.settings import Settings, checked
from mpdemo.training.measure import gather_objects, relative_difference
from mpdemo.world.env import World

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
    """A ResNet-18 cut in two, with GPipe: seconds a step for every number of microbatches, a number a round.

    The timelines go to a folder a number, in `out`: with how long each stage took for a microbatch.
    """
    contest, rungs = Contest(world), {}
    for count in (1, 2, 4, 8, 16):
        shape = {"schedule": "gpipe" if count > 1 else "naive", "microbatches": count, "timeline": True}
        rungs[count], step = pipeline(world, **RESNET[world.device.type], **shape)
        contest.add(count, step)
    contest.run(ROUNDS, warmup=1)
    for count, rung in rungs.items():
        rung.recorder.save(Path(out, str(count)))
    return contest.seconds


def one_process(world):
    """The same model and batch, two devices driven by one process: seconds a step, a number a round.

    Returns
    -------
    dict
        ``device``, ``seconds`` for each number of microbatches.
    """
    steps, seconds = {}, {}
    for count in (1, 4, 8):
        rung = {"rung": "pipeline", "microbatches": count} if count > 1 else {"rung": "model_parallel"}
        _, steps[count] = pipeline(world, form="one-process", devices=2, **rung, **RESNET[world.device.type])
    for number in range(-1, ROUNDS):
        for count, step in steps.items():
            took = timed(step)
            if number >= 0:
                seconds.setdefault(count, []).append(took)
    return {"device": world.device.type, "seconds": seconds}


def timed(step) -> float:
    """Seconds of one step, with all GPUs waited for."""
    begin = time.perf_counter()
    step()
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    return time.perf_counter() - begin


def norms(world, batch=128, microbatches=4):
    """How far a pipeline's gradients are from the single device's, with the whole batch and with the same parts."""
    found = data.load("digits")
    images, labels = (t[:batch] for t in found.train.tensors)
    result = {}
    for norm in ("group", "batch"):
        net = models.build("convnet", norm=norm)
        same = {"norm": norm, "batch_size": batch, "microbatches": microbatches}
        pipe = gradients(net, world, images, labels, rung="pipeline", **same)
        here = World(device=world.device)
        parts = gradients(net, here, images, labels, rung="single", **same)
        whole = gradients(net, here, images, labels, rung="single", **(same | {"microbatches": 1}))
        result[norm] = {
            "single, same microbatches": relative_difference(pipe, parts),
            "single, whole batch": relative_difference(pipe, whole),
        }
    return result


def gradients(net, world, images, labels, **settings) -> dict:
    """One step's gradients by name, of a rung built on a copy of the net."""
    settings = checked(Settings(**settings), world.world_size)
    rung = parallel.make(copy.deepcopy(net), world, settings)
    rung.step(images if rung.has_input else images.new_empty(len(images), 0), labels)
    return {name: parameter.grad for name, parameter in rung.named_parameters().items()}


def schedules(world, out, microbatches=4, halves="block.3", quarters="block.1,block.3,block.5"):
    """Every schedule on a transformer of equal blocks: seconds a step, a number a round.

    The timelines go to a folder a schedule, in `out`.
    """
    contest, rungs = Contest(world), {}
    for name, schedule in SCHEDULES.items():
        place = halves if schedule.stages_per_rank == 1 else quarters
        count = 1 if name == "naive" else microbatches
        shape = {"cut": place, "timeline": True, "schedule": name, "microbatches": count}
        rungs[name], step = pipeline(world, **EQUAL_BLOCKS[world.device.type], **shape)
        contest.add(name, step)
    contest.run(ROUNDS, warmup=1)
    for name, rung in rungs.items():
        rung.recorder.save(Path(out, name))
    return contest.seconds


def cuts(world, microbatches=4):
    """A ResNet cut after layer2, and where its measured blocks balance: seconds a step, a number a round.

    Returns
    -------
    dict
        ``names`` of the blocks; ``costs``, seconds of each for one microbatch, ``forward`` and ``backward``;
        ``points`` and ``seconds`` for each of the two cuts: the first block of the second stage, and the step.
    """
    shape = TO_CUT[world.device.type]
    size, count = shape["image_size"], shape["batch_size"] // microbatches
    net = models.build(shape["model"], classes=1000, channels=3, image_size=size).to(world.device)
    sample = torch.randn(count, 3, size, size, device=world.device)
    costs = gather_objects(measure(net, sample, [count])[count])[0]  # rank 0's: all ranks must cut alike
    after_layer2 = models.resolve_cut(net.names, "layer2.3", 2)
    points = {"after layer2": after_layer2, "balanced": balanced_cut([cost.both for cost in costs], 2)}
    contest = Contest(world)
    for name, cut in points.items():
        _, step = pipeline(world, **shape, cut=str(cut[0]), schedule="1f1b", microbatches=microbatches)
        contest.add(name, step)
    contest.run(ROUNDS, warmup=1)
    seconds = {"forward": [cost.forward for cost in costs], "backward": [cost.backward for cost in costs]}
    return {"model": shape["model"], "names": net.names, "costs": seconds, "points": points, "seconds": contest.seconds}


def pipeline(world, **settings):
    """Return a pipeline, in the form of a process a device unless told, and a function that does one step of it."""
    rung, _, step = make(Settings(**({"rung": "pipeline", "form": "per-device"} | settings)), world)
    return rung, step


if __name__ == "__main__":
    experiments = {f.__name__: f for f in (one_process, norms, cuts)}
    experiments |= {f.__name__: partial(f, out=sys.argv[1]) for f in (splits, schedules)}
    sys.exit(run(experiments, sys.argv[1], sys.argv[2:]))
