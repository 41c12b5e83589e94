"""A cut model against the uncut one on a single device, timed in turn. A job starts one process per stage.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.model_parallel runs/cut speed

Rank 0 writes what it measured to ``summary.json`` in the folder. Taught in notebooks/04_model_parallel.ipynb.
"""

import sys
from dataclasses import replace

import torch

from mpdemo.labs.harness import Comparison, run_lab
from mpdemo.settings import Settings


def speed(world, rounds=5):
    """Seconds per step of a ResNet-18, one number per round: uncut on one device, and cut in both forms.

    The one-process form is left out where a process sees a single GPU (``srun --gpus-per-task``).
    """
    single = Settings(rung="single", model="resnet18", image_size=32, batch_size=64)
    cut = replace(single, rung="model_parallel", cut="layer2.1" if world.world_size == 2 else None)
    comparison = Comparison(world)
    comparison.add("single device", single)
    comparison.add("cut, one process per device", replace(cut, form="per-device"))
    if world.device.type == "cpu" or torch.cuda.device_count() >= world.world_size:
        comparison.add("cut, one process", replace(cut, form="one-process", devices=world.world_size))
    comparison.run(rounds)
    speedup = {name: comparison.ratio("single device", name)[0] for name in comparison.seconds}
    return {"seconds": comparison.seconds, "speedup": speedup}


if __name__ == "__main__":
    sys.exit(run_lab({"speed": speed}, sys.argv[1], sys.argv[2:]))
