"""Toy programs in real processes: two tensors, twelve images, a small model. A job starts this in several processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.toys runs/toys all_reduce shares averaging

Every process runs the named functions; rank 0 writes all results to ``summary.json`` in the folder.
Taught in notebooks/03_ddp.ipynb.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from mpdemo import data, models
from mpdemo.labs.harness import run_lab
from mpdemo.parallel.rung import loss_fn
from mpdemo.training.measure import relative_difference


def all_reduce(world):
    """Add up a tensor over all processes, and show it before and after."""
    tensor = torch.tensor([1.0, 10.0], device=world.device)
    tensor *= world.rank + 1  # so it differs in every process
    before = tensor.tolist()
    print(f"rank {world.rank} has {before}\n", end="")

    dist.all_reduce(tensor)  # in place: now it holds the sum, in every process

    print(f"rank {world.rank} gets {tensor.tolist()}\n", end="")
    mean = tensor / world.world_size
    return {"before": before, "sum": tensor.tolist(), "mean": mean.tolist()}


def shares(world):
    """Which of twelve images this process takes, in two epochs, with and without `set_epoch`."""
    result = {}
    for name in ("with set_epoch", "without"):
        sampler = DistributedSampler(range(12), world.world_size, world.rank, shuffle=True, seed=0)
        result[name] = []
        for epoch in range(2):
            if name == "with set_epoch":
                sampler.set_epoch(epoch)
            result[name].append(list(sampler))
    return result


def averaging(world, epochs=3, batch=128, lr=0.3):
    """How far two ways of averaging end from the single device's weights (largest relative difference)."""
    images, labels = (tensor.to(world.device) for tensor in data.load("digits").train.tensors)
    steps = list(zip(images.split(batch), labels.split(batch), strict=True)) * epochs
    start = models.build("toy").to(world.device)
    single, gradients, weights = (copy.deepcopy(start) for _ in range(3))
    for number, (x, y) in enumerate(steps, 1):
        share = x.chunk(world.world_size)[world.rank], y.chunk(world.world_size)[world.rank]
        sgd(single, x, y, lr)  # the whole batch
        sgd(gradients, *share, lr, mean=True)  # DDP: the mean of the gradients, every step
        sgd(weights, *share, lr)  # alone ...
        if number % (len(steps) // epochs) == 0:
            for parameter in weights.parameters():  # ... and the mean of the weights, after each epoch
                mean_over_ranks(parameter.data)
    reference = dict(single.named_parameters())
    ways = {"gradients, every step": gradients, "weights, after each epoch": weights}
    return {way: relative_difference(dict(model.named_parameters()), reference) for way, model in ways.items()}


def sgd(model, images, labels, lr, mean=False):
    """One plain step on these images; with `mean` the gradients are first averaged over the processes."""
    model.zero_grad()
    loss_fn(model(images), labels).backward()
    for parameter in model.parameters():
        if mean:
            mean_over_ranks(parameter.grad)
        parameter.data -= lr * parameter.grad


def mean_over_ranks(tensor):
    """Replace a tensor by its mean over all processes."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


if __name__ == "__main__":
    toys = {"all_reduce": all_reduce, "shares": shares, "averaging": averaging}
    sys.exit(run_lab(toys, sys.argv[1], sys.argv[2:]))
