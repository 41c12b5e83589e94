"""ResNet-101 cut after layer2, batch 128 at 224 px, both stages on one GPU: rows of JSON, to argv[1].

Memory: each stage alone, fed with saved activations, beside what the plan says of it; then both together. (On two V100
of 16 GB the stages of this case held 7,950 and 8,224 MiB.) Time: the forward and backward passes of both stages, one
after the other on one stream, then each on a stream of its own, to see whether kernels of one process can overlap.
Without a GPU everything is small, and there is one kind of stream.
"""

import contextlib
import random
import sys

import torch
from memory_of_one import STAGES, append, row_of_stage
from torch import nn
from torchvision.models import resnet18, resnet101

from mpdemo.measure import paired
from mpdemo.world import clock
from mpdemo.world.env import where_am_i

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BATCH, SIZE, NETWORK, ROUNDS = (128, 224, resnet101, paired.ROUNDS) if ON_GPU else (4, 32, resnet18, 2)


def halves() -> tuple:
    """Return the two stages, the batch that enters each, and the gradient that leaves each in the backward pass."""
    network = NETWORK().to(DEVICE)
    first = nn.Sequential(*list(network.children())[:6])
    second = nn.Sequential(*list(network.children())[6:-1], nn.Flatten(), network.fc)
    images = torch.randn(BATCH, 3, SIZE, SIZE, device=DEVICE)
    saved = first(images).detach().requires_grad_()
    gradients = torch.randn_like(saved), torch.randn_like(second(saved))
    return (first, second), (images, saved), gradients


def work(stage, batch, gradient):
    """Run a stage forward and backward."""
    stage(batch).backward(gradient)


def peak_of_both(stages, batches, gradients) -> float | None:
    """Return the most MiB that PyTorch held while both stages ran, one after the other."""
    if not ON_GPU:
        return None
    torch.cuda.reset_peak_memory_stats()
    for each in zip(stages, batches, gradients, strict=True):
        work(*each)
    clock.wait(DEVICE)
    return torch.cuda.max_memory_allocated() / 2**20


def timed(parts, streams) -> float:
    """Return the seconds that all parts take, each in its stream."""
    clock.wait(DEVICE)
    begin = clock.now(DEVICE)
    for part, stream in zip(parts, streams, strict=True):
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            work(*part)
    clock.wait(DEVICE)
    return clock.now(DEVICE) - begin


def overlap(parts) -> dict:
    """Compare one stream with two, in rounds whose order is shuffled."""
    streams = {"one stream": [None, None], "two streams": [torch.cuda.Stream() if ON_GPU else None for _ in parts]}
    seconds = {name: [] for name in streams}
    for name in streams:
        timed(parts, streams[name])  # warm up
    for _ in range(ROUNDS):
        for name in random.sample(list(streams), len(streams)):
            seconds[name].append(timed(parts, streams[name]))
    faster = paired.ratio(seconds["one stream"], seconds["two streams"])
    return {"seconds": seconds, "speedup_of_two_streams": faster.median, "speedup_interval": faster.interval}


def main():
    place, rows = where_am_i(), []
    if ON_GPU:
        rows += [{"memory": row_of_stage(STAGES[-1], place, number)} for number in range(2)]
    parts = list(zip(*halves(), strict=True))
    rows.append({"both_stages_mib": peak_of_both(*zip(*parts, strict=True)), "batch": BATCH, "size": SIZE})
    rows.append({"overlap": overlap(parts)})
    append(rows, sys.argv[1])


if __name__ == "__main__":
    main()
