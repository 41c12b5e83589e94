"""DDP looked at while it works: its gradients, its buckets, its speed. A job starts this in several processes.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.ddp runs/lab gradients buckets speed

Every process runs the named functions; rank 0 writes what all of them returned to ``summary.json`` in the folder.
Taught in notebooks/03_ddp.ipynb.
"""

import copy
import sys
import time

import torch
import torch.distributed as dist

from mpdemo import data, models, parallel
from mpdemo.labs.contest import Contest, training_step
from mpdemo.labs.toys import run
from mpdemo.settings import Settings, checked
from mpdemo.training.measure import relative_difference
from mpdemo.world.env import World


def gradients(world):
    """How far this process's gradients are from the single device's, for both norms (largest relative difference)."""
    return {norm: compare(world, norm) for norm in ("group", "batch")}


def compare(world, norm, batch=128):
    """The gradients of one batch: of this share alone, by DDP, and by a single device that has the whole batch."""
    found = data.load("digits")
    images, labels = (t[:batch] for t in found.train.tensors)
    share = images.chunk(world.world_size)[world.rank], labels.chunk(world.world_size)[world.rank]
    net, here = models.build("convnet", norm=norm), World(device=world.device)
    whole = gradients_of(make("single", net, here, norm=norm), images, labels)
    alone = gradients_of(make("single", net, here, norm=norm), *share)
    ddp = gradients_of(make("ddp", net, world, norm=norm), *share)
    parts = make("single", net, here, norm=norm, microbatches=world.world_size)
    return {
        "share alone": relative_difference(alone, whole),
        "ddp": relative_difference(ddp, whole),
        "ddp, single in as many parts": relative_difference(ddp, gradients_of(parts, images, labels)),
    }


def make(rung, net, world, **settings):
    """Build a rung on a copy of the net."""
    settings = checked(Settings(rung=rung, batch_size=128, **settings), world.world_size)
    return parallel.make(copy.deepcopy(net), world, settings)


def gradients_of(rung, images, labels) -> dict:
    """One step's gradients by name."""
    rung.step(images, labels)
    return {name: parameter.grad for name, parameter in rung.named_parameters().items()}


def buckets(world, image_size=64, share=16, warmup=3):
    """When each bucket of gradients of a ResNet-18 was ready, and when it was reduced, in one step.

    Returns
    -------
    dict
        Seconds since the step began: ``forward`` (its end), ``backward`` (the end of the whole step) and
        ``buckets``, a list of ``{"mib", "ready", "reduced"}``.
    """
    net = models.build("resnet18", channels=3, image_size=image_size)
    rung = make("ddp", net, world)
    seen = []
    rung.parallel.register_comm_hook(seen, note_bucket)
    images = torch.randn(share, 3, image_size, image_size, device=world.device)
    for _ in range(warmup + 1):  # DDP settles what goes into which bucket in its first step
        seen.clear()
        dist.barrier()
        begin = stamp(world.device)
        loss = rung.parallel(images).sum()
        forward = stamp(world.device)
        loss.backward()
        end = stamp(world.device)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    rows = [{"mib": mib, "ready": since(begin, a), "reduced": since(begin, b)} for mib, a, b in seen]
    return {"forward": since(begin, forward), "backward": since(begin, end), "buckets": rows}


def note_bucket(seen, bucket):
    """DDP calls this when a bucket is full: what it does itself, and two looks at the clock."""
    gradients, ready = bucket.buffer(), stamp(bucket.buffer().device)
    gradients /= dist.get_world_size()

    def reduced(future):
        seen.append((gradients.nbytes / 2**20, ready, stamp(gradients.device)))
        return future.value()[0]

    return dist.all_reduce(gradients, async_op=True).get_future().then(reduced)


def stamp(device):
    """The time: of the host on a CPU; on a GPU an event in its queue of work, which the host runs ahead of."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def since(begin, stamped) -> float:
    """Seconds between two stamps."""
    return stamped - begin if isinstance(begin, float) else begin.elapsed_time(stamped) / 1000


def speed(world, rounds=5, batch=64, image_size=64):
    """Seconds a step of a ResNet-18, a number a round: alone, in processes that do not talk, and by DDP."""
    net = models.build("resnet18", classes=1000, channels=3, image_size=image_size)
    images, labels = torch.randn(batch, 3, image_size, image_size), torch.randint(0, 1000, (batch,))
    share = batch // world.world_size
    contest = Contest(world)
    for name, rung_name, here, count in (
        ("single", "single", World(device=world.device), batch),
        ("independent", "single", World(device=world.device), share),
        ("ddp", "ddp", world, share),
    ):
        rung = make(rung_name, net, here)
        optimizer = torch.optim.SGD(rung.named_parameters().values(), lr=1e-4)
        contest.add(name, training_step(rung, optimizer, images[:count], labels[:count]), alone=name == "single")
    contest.run(rounds, warmup=1)
    speedup, bound = contest.ratio("single", "ddp")[0], contest.ratio("single", "independent")[0]
    share_of_bound = contest.ratio("independent", "ddp")[0]  # round by round: what disturbs one disturbs the other
    return {"seconds": contest.seconds, "speedup": speedup, "bound": bound, "share_of_bound": share_of_bound}


if __name__ == "__main__":
    experiments = {"gradients": gradients, "buckets": buckets, "speed": speed}
    sys.exit(run(experiments, sys.argv[1], sys.argv[2:]))
