"""DDP observed while it works: its gradients, its buckets; what to average. A job starts this in several processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.ddp runs/lab gradients averaging buckets

Every process runs the named functions; rank 0 writes all results to ``summary.json`` in the folder.
Taught in notebooks/03_ddp.ipynb.
"""

import copy
import sys

import torch.distributed as dist

from mpdemo import data, models
from mpdemo.labs.harness import rest, run_lab
from mpdemo.trial import Trial
from torch.nn.functional import cross_entropy as loss_fn
from mpdemo.settings import Settings
from mpdemo.trial import relative_difference
from mpdemo.world import clock
from mpdemo.world.launch import end


def gradients(world, batch=64):
    """How far this process's gradients of one batch are from the single device's (largest relative difference).

    Of the story's model: of this share alone; by DDP; by DDP in two parts with ``no_sync``; and by DDP against a single
    device that takes the batch in as many parts as there are processes.
    """
    images, labels = (tensor[:batch] for tensor in data.load("digits").train.tensors)
    share = images.chunk(world.world_size)[world.rank], labels.chunk(world.world_size)[world.rank]
    model = models.build("transformer")

    def gradients_of(batch_of_images=(images, labels), **changes):
        settings = Settings(**{"rung": "single", "model": "transformer", "batch_size": batch} | changes)
        return Trial(settings, world, model, batch_of_images).gradients()

    whole, ddp = gradients_of(), gradients_of(rung="ddp")
    return {
        "share alone": relative_difference(gradients_of(share, batch_size=batch // world.world_size), whole),
        "ddp": relative_difference(ddp, whole),
        "ddp, accumulated": relative_difference(gradients_of(rung="ddp", microbatches=2), whole),
        "ddp, single in as many parts": relative_difference(ddp, gradients_of(microbatches=world.world_size)),
    }


def buckets(world, image_size=64, share=16, warmup=3):
    """When each bucket of gradients of a ResNet-18 was ready, and when it was reduced, in one step.

    Returns
    -------
    dict
        Seconds since the step began: ``forward`` (its end), ``backward`` (the end of the whole step) and
        ``buckets``, a list of ``{"mib", "ready", "reduced"}``.
    """
    batch = share * world.world_size
    trial = Trial(Settings(rung="ddp", model="resnet18", image_size=image_size, batch_size=batch), world)
    observed, ddp, images = [], trial.rung.parallel, trial.images.to(world.device)
    ddp.register_comm_hook(observed, time_bucket)
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


def time_bucket(observed, bucket):
    """All-reduce a full bucket, as DDP does without this hook, and read the clock before and after."""
    gradients, ready = bucket.buffer(), clock.read(bucket.buffer().device)
    gradients /= dist.get_world_size()

    def note(future):
        observed.append((gradients.nbytes / 2**20, ready, clock.read(gradients.device)))
        return future.value()[0]

    return dist.all_reduce(gradients, async_op=True).get_future().then(note)


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
    experiments = {"gradients": gradients, "averaging": averaging, "buckets": buckets}
    end(run_lab(experiments, sys.argv[1], sys.argv[2:]))
