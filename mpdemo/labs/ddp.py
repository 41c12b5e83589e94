"""DDP observed while it works: its gradients, its buckets, its speed. A job starts this in several processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.ddp runs/lab gradients buckets speed

Every process runs the named functions; rank 0 writes all results to ``summary.json`` in the folder.
Taught in notebooks/03_ddp.ipynb.
"""

import sys
from dataclasses import replace

import torch.distributed as dist

from mpdemo import data, models
from mpdemo.labs.harness import Comparison, rest, run_lab
from mpdemo.labs.trial import Trial
from mpdemo.settings import Settings
from mpdemo.training.measure import relative_difference
from mpdemo.world import clock


def gradients(world):
    """How far this process's gradients are from the single device's, for both norms (largest relative difference)."""
    return {norm: compare(world, norm) for norm in ("group", "batch")}


def compare(world, norm, batch=128):
    """The gradients of one batch: of this share alone, by DDP, and by a single device that has the whole batch."""
    images, labels = (tensor[:batch] for tensor in data.load("digits").train.tensors)
    share = images.chunk(world.world_size)[world.rank], labels.chunk(world.world_size)[world.rank]
    model, single = models.build("convnet", norm=norm), Settings(rung="single", norm=norm, batch_size=batch)
    alone = replace(single, batch_size=batch // world.world_size)
    in_parts = replace(single, microbatches=world.world_size)
    whole = Trial(single, world, model, (images, labels)).gradients()
    ddp = Trial(replace(single, rung="ddp"), world, model, (images, labels)).gradients()
    parts = Trial(in_parts, world, model, (images, labels)).gradients()
    return {
        "share alone": relative_difference(Trial(alone, world, model, share).gradients(), whole),
        "ddp": relative_difference(ddp, whole),
        "ddp, single in as many parts": relative_difference(ddp, parts),
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


def speed(world, rounds=5, batch=64, image_size=64):
    """Seconds per step of a ResNet-18, one number per round: alone, in processes that do not talk, and by DDP."""
    single = Settings(rung="single", model="resnet18", image_size=image_size, batch_size=batch)
    comparison = Comparison(world)
    comparison.add("single", single)
    comparison.add("independent", replace(single, batch_size=batch // world.world_size), everywhere=True)
    comparison.add("ddp", replace(single, rung="ddp"))
    comparison.run(rounds, warmup=1)
    return {
        "seconds": comparison.seconds,
        "speedup": comparison.ratio("single", "ddp")[0],
        "bound": comparison.ratio("single", "independent")[0],
        "share_of_bound": comparison.ratio("independent", "ddp")[0],  # by round: a disturbance meets both
    }


if __name__ == "__main__":
    experiments = {"gradients": gradients, "buckets": buckets, "speed": speed}
    sys.exit(run_lab(experiments, sys.argv[1], sys.argv[2:]))
