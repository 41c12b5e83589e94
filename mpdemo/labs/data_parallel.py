"""Data parallelism in one process against the single device, timed in turn with its bound and with DDP.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.data_parallel runs/lab speed

One process per device is started, so that the bound and DDP can be measured in the same minute; the single device and
the data-parallel process are rank 0 alone, while the others rest. Rank 0 writes ``summary.json`` in the folder.
Taught in notebooks/02_data_parallel.ipynb.
"""

import sys
from dataclasses import replace

import torch

from mpdemo.labs.harness import Comparison, run_lab
from mpdemo.settings import Settings


def speed(world, rounds=5):
    """Seconds per step of a ResNet-18, one number per round, and the speed-ups over one device.

    The data-parallel process is left out where it sees fewer GPUs than there are processes (``--gpus-per-task``).
    """
    single = Settings(rung="single", model="resnet18", image_size=32, batch_size=64)
    comparison = Comparison(world)
    comparison.add("one device", single)
    share = single.batch_size // world.world_size
    comparison.add("independent processes", replace(single, batch_size=share), everywhere=True)
    if world.device.type == "cpu" or torch.cuda.device_count() >= world.world_size:
        comparison.add("data parallel", replace(single, rung="data_parallel", devices=world.world_size))
    comparison.add("DDP", replace(single, rung="ddp"))
    comparison.run(rounds)
    speedup = {name: comparison.ratio("one device", name)[0] for name in comparison.seconds}
    return {"batch": single.batch_size, "seconds": comparison.seconds, "speedup": speedup}


if __name__ == "__main__":
    sys.exit(run_lab({"speed": speed}, sys.argv[1], sys.argv[2:]))
