"""Measure on one GPU what the course says of GPUs, and print it as two tables for notebooks/on_a_gpu.md.

    python tests/gpu/measure.py

All variants of a table run in turn in one process. The second table asks whether one process that drives two stages
overlaps them where both lie on the same GPU: the pipeline's time beside the naive one's.
"""

import platform
import time
from dataclasses import replace

import torch

from mpdemo.measure.compare import Comparison
from mpdemo.measure.paired import ratio
from mpdemo.options import as_arguments
from mpdemo.settings import Settings
from mpdemo.training import setup
from mpdemo.world.env import where_am_i
from mpdemo.world.launch import end

RESNET = Settings(rung="single", model="resnet50", image_size=224, batch_size=128, optimizer="sgd")
SMALL = {"model": "convnet", "image_size": 28, "batch_size": 16}  # on a CPU, which tests this program
BF16, COMPILED = {"precision": "bf16"}, {"compile": True}
OPTIONS = ({}, BF16, COMPILED, BF16 | COMPILED)
CUT = {"form": "one-process", "devices": 2}
ROUNDS = 15


def table(title, world, variants, reference, rounds):
    """Print the milliseconds per step of each variant, and how many times as fast as the reference it is."""
    print(f"\n| {title} | ms per step | times as fast (95 % interval) |\n|---|---|---|")
    comparison = Comparison(world)
    for name, settings in variants.items():
        comparison.add(name, settings)
    comparison.run(rounds)
    for name in variants:
        faster = ratio(comparison.seconds[reference], comparison.seconds[name])
        print(f"| {name} | {1000 * comparison.median(name):.1f} | {faster} |")


def main():
    world = where_am_i()
    on_gpu = world.device.type == "cuda"
    plain, rounds = (RESNET, ROUNDS) if on_gpu else (replace(RESNET, **SMALL), 2)
    device = torch.cuda.get_device_name(world.device) if on_gpu else "one CPU core"
    torch.set_num_threads(1)
    print(f"{device}, PyTorch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}.")
    options = OPTIONS if on_gpu else OPTIONS[:2]
    variants = {" ".join(as_arguments(option)) or "float32": replace(plain, **option) for option in options}
    table(f"{plain.model}, {plain.image_size} px, batch {plain.batch_size}", world, variants, "float32", rounds)
    setup.local_devices = lambda device, count: [device] * count
    variants = {"single": plain, "model_parallel": replace(plain, rung="model_parallel", **CUT)}
    for parts in (2, 4, 8):
        variants[f"pipeline, {parts} microbatches"] = replace(plain, rung="pipeline", microbatches=parts, **CUT)
    table("two stages on one GPU, batch norm per microbatch", world, variants, "single", rounds)


if __name__ == "__main__":
    end(main())
