"""Data parallelism in one process against the single device, timed in turn with its bound and with DDP.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.data_parallel runs/lab speed

A process a device is started, so that the bound and DDP can be measured in the same minute; the single device and the
data-parallel process are rank 0 alone, while the others rest. Rank 0 writes ``summary.json`` in the folder.
Taught in notebooks/02_data_parallel.ipynb.
"""

import sys
from dataclasses import replace

import torch

from mpdemo.bench.parts import make
from mpdemo.labs.contest import Contest, use_all_cores
from mpdemo.labs.toys import run
from mpdemo.settings import Settings
from mpdemo.world.env import claim_cores


def speed(world, rounds=5):
    """Seconds a step of a ResNet-18, a number a round, and the speed-ups over one device.

    The data-parallel process is left out where it sees fewer GPUs than there are processes (``--gpus-per-task``).
    """
    base = Settings(model="resnet18", image_size=32, batch_size=64)
    share = base.batch_size // world.world_size
    contest = Contest(world)
    contest.add("one device", make(base, world)[2], alone=True)
    contest.add("independent processes", make(replace(base, batch_size=share), world)[2])
    if world.device.type == "cpu" or torch.cuda.device_count() >= world.world_size:
        contest.add("data parallel", data_parallel_step(base, world), alone=True, all_cores=world.device.type == "cpu")
    contest.add("DDP", make(replace(base, rung="ddp", form="per-device"), world)[2])
    contest.run(rounds)
    speedup = {name: contest.ratio("one device", name)[0] for name in contest.seconds}
    return {"batch": base.batch_size, "seconds": contest.seconds, "speedup": speedup}


def data_parallel_step(base, world):
    """The step of the one process that drives all devices, None in the others; its threads get a core each."""
    if world.rank > 0:
        return None
    pinned = use_all_cores() if world.device.type == "cpu" else None
    step = make(replace(base, rung="data_parallel", devices=world.world_size), world)[2]
    step()  # starts the threads, which keep the cores that are allowed now
    if pinned:
        claim_cores(world)
    return step


if __name__ == "__main__":
    sys.exit(run({"speed": speed}, sys.argv[1], sys.argv[2:]))
