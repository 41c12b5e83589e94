"""A cut model against the uncut one on a single device, timed in turn. A job starts a process for each stage.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.model_parallel runs/cut speed

Rank 0 writes what it measured to ``summary.json`` in the folder. Taught in notebooks/04_model_parallel.ipynb.
"""

import sys
from dataclasses import replace

import torch

from mpdemo.bench.parts import make
from mpdemo.labs.contest import Contest
from mpdemo.labs.toys import run
from mpdemo.settings import Settings


def speed(world, rounds=5):
    """Seconds a step of a ResNet-18, a number a round: uncut on one device, and cut in both forms.

    The one-process form is left out where a process sees a single GPU (``srun --gpus-per-task``).
    """
    base = Settings(model="resnet18", image_size=32, batch_size=64)
    cut = replace(base, rung="model_parallel", cut="layer2.1" if world.world_size == 2 else None)
    variants = {
        "single device": base,
        "cut, a process a device": replace(cut, form="per-device"),
        "cut, one process": replace(cut, form="one-process", devices=world.world_size),
    }
    if world.device.type == "cuda" and torch.cuda.device_count() < world.world_size:
        del variants["cut, one process"]
    contest = Contest(world)
    for name, settings in variants.items():
        _, _, step = make(settings, world)
        contest.add(name, step, alone=settings.form != "per-device")
    contest.run(rounds)
    return {"seconds": contest.seconds, "speedup": {name: contest.ratio("single device", name)[0] for name in variants}}


if __name__ == "__main__":
    sys.exit(run({"speed": speed}, sys.argv[1], sys.argv[2:]))
