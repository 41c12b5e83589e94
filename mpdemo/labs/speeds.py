"""Measure what a step consists of, in seconds: blocks, the optimizer's update, messages.

`mpdemo.plan.step_time` puts a step together from these; `mpdemo.labs.step_times` compares the sums with real steps.
"""

import copy
import time
from functools import partial
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from mpdemo.labs.harness import rest
from mpdemo.labs.trial import Trial
from mpdemo.plan import cost
from mpdemo.plan.sharded_layers import local_shape
from mpdemo.plan.step_time import SHARDED, Speeds, fewest_images, images_at_once
from mpdemo.training.build import make_optimizer
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects

SHORT, LONG = 16 * 2**10, 8 * 2**20  # bytes of the two messages through which a line is laid
REPEATS = 15


def measured_speeds(world, model, batch, settings) -> Speeds:
    """Measure what a step consists of, on all devices at once and on the first alone."""
    sizes, everyone = {images_at_once(s) for s in settings} | {1}, world.world_size
    of_parts = {images_at_once(s) for s in settings if s.rung == "tensor"} | {1, len(batch[0])}
    fewest = {fewest_images(s) for s in settings if s.rung in SHARDED}
    model, images = copy.deepcopy(model).to(world.device), batch[0].to(world.device)
    optimizer = make_optimizer(model.parameters(), settings[0])
    between = model.stage(0, 1)(images)  # what a block puts out: (B, T, D)
    return Speeds(
        alone=block_costs(world, model, images, sizes, 1),
        together=block_costs(world, model, images, sizes, everyone),
        update=timed(world, optimizer.step) / sum(p.numel() * p.element_size() for p in model.parameters()),
        messages={"send": message_costs(world, back_and_forth, 2), "all-reduce": message_costs(world, all_reduce)},
        split=block_costs(world, split_copy(model, everyone), images, of_parts, everyone),
        sums={size: cost_of_sum(world, between[:size].detach()) for size in of_parts},
        fewest={s: timed(world, Trial(s, world, model, batch).step) for s in sorted(fewest, key=str)},
    )


def split_copy(model, splits):
    """Return a copy whose layers are as large as what one of so many devices has under tensor parallelism."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            rows, columns = local_shape(f"{name}.weight", layer.weight.shape, splits)
            model.set_submodule(name, nn.Linear(columns, rows, layer.bias is not None, device=layer.weight.device))
    return model


def block_costs(world, model, images, sizes, ranks) -> dict:
    """Measure the blocks at several sizes in so many ranks at once, the others rest; images of a size -> costs.

    A block on its own is faster than in a step, where other blocks took its place in the cache. So a whole step is
    measured as well, and what it takes longer than its blocks is given to each of them.
    """
    active, labels = world.rank < ranks, torch.zeros(len(images), dtype=torch.long, device=world.device)

    def step():
        if active:
            model.zero_grad()
            cross_entropy(model(images), labels).backward()

    rest()
    measured = [c for c in gather_objects(cost.measure(model, images, sizes) if active else None) if c]
    whole = timed(world, step)
    costs = {size: mean_of([rank[size] for rank in measured]) for size in sizes}
    factor = whole / sum(block.both for block in costs[len(images)])
    return {size: [cost.BlockCost(*(factor * x for x in block)) for block in blocks] for size, blocks in costs.items()}


def mean_of(costs) -> list:
    """Return the mean costs of every block, from the costs that each rank measured."""
    return [cost.BlockCost(*map(mean, zip(*block, strict=True))) for block in zip(*costs, strict=True)]


def message_costs(world, send, messages=1) -> tuple[float, float]:
    """Return seconds of a short message and seconds per byte, from calls that send `messages` of one of two sizes."""
    tensors = [torch.zeros(size // 4, device=world.device) for size in (SHORT, LONG)]
    short, long = (timed(world, partial(send, world, tensor)) / messages for tensor in tensors)
    per_byte = (long - short) / (LONG - SHORT)
    return short - SHORT * per_byte, per_byte


def cost_of_sum(world, tensor) -> float:
    """Return the seconds of an all-reduce that follows a computation: longer than of one that follows another.

    The tensor (B, T, D) is no longer in the cache, and the ranks are not ready at the same moment.
    """
    weights = torch.eye(tensor.shape[-1], device=tensor.device).repeat(1, 4)

    def compute(summing):
        for _ in range(REPEATS):
            tensor @ weights
            if summing:
                all_reduce(world, tensor)

    without, together = (timed(world, partial(compute, summing)) for summing in (False, True))
    return max(0.0, together - without) / REPEATS


def timed(world, function) -> float:
    """Return the median seconds of a call that all ranks make at the same time."""
    taken = []
    for _ in range(REPEATS):
        rest()
        begin = time.perf_counter()
        function()
        clock.wait(world.device)
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def all_reduce(world, tensor):
    """Add up over all ranks."""
    dist.all_reduce(tensor)


def back_and_forth(world, tensor):
    """Send from rank 0 to rank 1, and back; the others rest."""
    for sender in (0, 1) if world.rank < 2 else ():
        (dist.send if world.rank == sender else dist.recv)(tensor, 1 - world.rank)
