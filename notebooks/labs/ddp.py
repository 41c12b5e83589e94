"""DDP observed while it works: its gradients, its buckets; what to average. A job starts this in several processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.ddp runs/lab gradients averaging buckets

Every process runs the named functions; rank 0 writes all results to ``summary.json`` in the folder.
Taught in notebooks/03_ddp.ipynb.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mpdemo import data, models
from mpdemo.compare import rest, run_lab
from mpdemo.trial import relative_difference
from mpdemo.world import clock
from mpdemo.world.launch import end


def gradients(world, batch=64):
    """Return how far this process's gradients of one batch are from the single device's (largest, relative).

    Of the course model: of this share alone; by DDP; by DDP in two parts with ``no_sync``; and by DDP against a single
    device that takes the batch in as many parts as there are processes.
    """
    images, labels = (tensor[:batch].to(world.device) for tensor in data.load("digits").train.tensors)
    share = images.chunk(world.world_size)[world.rank], labels.chunk(world.world_size)[world.rank]
    single = models.build("transformer").to(world.device)
    ddp = DistributedDataParallel(copy.deepcopy(single))
    whole, averaged = gradients_of(single, images, labels), gradients_of(ddp, *share)
    in_parts = gradients_of(single, images, labels, world.world_size)
    return {
        "share alone": relative_difference(gradients_of(single, *share), whole),
        "ddp": relative_difference(averaged, whole),
        "ddp, accumulated": relative_difference(gradients_of(ddp, *share, parts=2), whole),
        "ddp, single in as many parts": relative_difference(averaged, in_parts),
    }


def gradients_of(model, images, labels, parts=1) -> dict:
    """Return the gradients of a batch that the model takes in some parts, averaged after the last one, by name."""
    model.zero_grad()
    for number, (x, y) in enumerate(zip(images.chunk(parts), labels.chunk(parts), strict=True), 1):
        model.require_backward_grad_sync = number == parts  # what `with ddp.no_sync()` sets
        (cross_entropy(model(x), y) / parts).backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def buckets(world, image_size=64, share=16, warmup=3):
    """Return when each bucket of gradients of a ResNet-18 was ready, and when it was reduced, in one step.

    In seconds since the step began: ``forward`` (its end), ``backward`` (the end of the whole step) and ``buckets``, a
    list of ``{"mib", "ready", "reduced"}``.
    """
    model = models.build("resnet18", classes=1000, channels=3, image_size=image_size).to(world.device)
    images = torch.randn(share, 3, image_size, image_size, device=world.device)
    observed, ddp = [], DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp.register_comm_hook(lambda *row: observed.append(row), time_bucket)
    for _ in range(warmup + 1):  # DDP settles what goes into which bucket in its first step
        observed.clear()
        rest()
        begin = clock.read(world.device)
        loss = ddp(images).sum()
        forward = clock.read(world.device)
        loss.backward()
        end = clock.read(world.device)
    rows = [
        {"mib": mib, "ready": clock.seconds(begin, ready), "reduced": clock.seconds(begin, reduced)}
        for mib, ready, reduced in observed
    ]
    return {"forward": clock.seconds(begin, forward), "backward": clock.seconds(begin, end), "buckets": rows}


def time_bucket(note, bucket):
    """All-reduce a full bucket, as DDP does without this hook; note its MiB and the clock before and after."""
    gradients, ready = bucket.buffer(), clock.read(bucket.buffer().device)
    gradients /= dist.get_world_size()

    def reduced(future):
        note(gradients.nbytes / 2**20, ready, clock.read(gradients.device))
        return future.value()[0]

    return dist.all_reduce(gradients, async_op=True).get_future().then(reduced)


def averaging(world, epochs=3, batch=128, lr=0.3):
    """Return how far two ways of averaging end from the single device's weights (largest relative difference)."""
    images, labels = (tensor.to(world.device) for tensor in data.load("digits").train.tensors)
    steps = list(zip(images.split(batch), labels.split(batch), strict=True)) * epochs
    single = models.build("toy").to(world.device)
    ddp, alone = DistributedDataParallel(copy.deepcopy(single)), copy.deepcopy(single)
    for number, whole in enumerate(steps, 1):
        share = [tensor.chunk(world.world_size)[world.rank] for tensor in whole]
        for model, (x, y) in ((single, whole), (ddp, share), (alone, share)):
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                parameter.data -= lr * parameter.grad
        if number % (len(steps) // epochs) == 0:
            for parameter in alone.parameters():  # the mean of the weights
                dist.all_reduce(parameter.data)
                parameter.data /= world.world_size
    reference = dict(single.named_parameters())
    ways = {"gradients, every step": ddp.module, "weights, after each epoch": alone}
    return {way: relative_difference(dict(model.named_parameters()), reference) for way, model in ways.items()}


if __name__ == "__main__":
    experiments = {"gradients": gradients, "averaging": averaging, "buckets": buckets}
    end(run_lab(experiments, sys.argv[1], sys.argv[2:]))
