"""What every block of a model costs in time, measured on this machine (`mpdemo.plan.footprint` estimates it for a GPU).

The cost depends on the microbatch: a small one uses the device badly. So it is measured at several sizes.
Taught in notebooks/05_pipeline.ipynb.
"""

import time
from bisect import bisect
from functools import partial
from operator import add
from statistics import median
from typing import NamedTuple

from mpdemo.world.clock import now

REPEATS = 3


class BlockCost(NamedTuple):
    """Seconds that one block needs for one microbatch.

    `backward` computes all gradients at once; `input` and `weight` are its two halves as zero-bubble schedules run
    them, together a little more than `backward`.
    """

    forward: float
    backward: float
    input: float
    weight: float

    def __add__(self, other):
        return BlockCost(*map(add, self, other))

    @property
    def both(self):
        """Forward and backward."""
        return self.forward + self.backward


def total(costs) -> float:
    """Return the seconds of forward and backward of all blocks."""
    return sum(cost.both for cost in costs)


def bandwidth(per_byte) -> float:
    """Return the bytes per second of messages that take so many seconds per byte; without a time they are free."""
    return 1 / per_byte if per_byte > 0 else float("inf")


def measure(models, sample, *, repeats=REPEATS, budget=60.0, halves=True):
    """Measure every block at several microbatch sizes, on the device and with the threads that are set.

    Parameters
    ----------
    models : dict
        Samples of a microbatch -> the uncut model as `mpdemo.models.Blocks`, on its device, in training mode. It is the
        same for every size, but for a traced one, which takes one size alone.
    sample : torch.Tensor
        Inputs (B, ...), at least as many as the largest size.
    repeats : int
        Measurements of which the median counts; one more before them is thrown away.
    budget : float
        Seconds after which no larger size is begun; what is missing is extrapolated.
    halves : bool
        As for `once`.

    Returns
    -------
    dict
        Size -> list of BlockCost, one per block.
    """
    parts = {size: [models[size].stage(i, i + 1) for i in range(len(models[size]))] for size in sorted(models)}
    clock, began, each, runs = _clock(sample.device), time.monotonic(), 0.0, {}
    for size in parts:  # thrown away, but for the time it took
        spent = time.monotonic() - began
        if len(runs) >= 2 and (spent + each * size) * (1 + repeats) > budget:
            break
        once(parts[size], sample[:size], clock, halves)
        each, runs[size] = (time.monotonic() - began - spent) / size, []
    for _ in range(repeats):  # all sizes alternately: what else the machine does meets them alike
        for size, costs in runs.items():
            costs.append(once(parts[size], sample[:size], clock, halves))
    for parameter in (p for model in models.values() for p in model.parameters()):
        parameter.grad = None
    measured = {size: medians(costs) for size, costs in runs.items()}
    return {size: at(measured, size) for size in parts}


def at(measured, size) -> list:
    """Return the costs of all blocks for any size: on straight lines through those that were measured.

    Beyond the largest one a line rises at least as the cost per sample there: noise must not make large batches free.

    Parameters
    ----------
    measured : dict
        At least two sizes -> list of BlockCost.
    size : int
        Samples of a microbatch.
    """
    if size in measured:
        return measured[size]
    sizes = sorted(measured)
    above = min(max(1, bisect(sizes, size)), len(sizes) - 1)
    small, large = sizes[above - 1 : above + 1]

    def line(y0, y1):
        slope = (y1 - y0) / (large - small)
        if size > large:
            slope = max(slope, 0.8 * y1 / large)
        return max(0.0, y1 + (size - large) * slope)

    return [BlockCost(*map(line, a, b)) for a, b in zip(measured[small], measured[large], strict=True)]


def medians(runs) -> list:
    """Return the median cost of every block; `runs` are lists with a BlockCost per block."""
    return [BlockCost(*map(median, zip(*block, strict=True))) for block in zip(*runs, strict=True)]


def once(parts, x, clock, halves=True) -> list:
    """Run every block forward, and then every block backward, the last one first.

    Parameters
    ----------
    parts : list of mpdemo.models.Blocks
        One block each.
    x : torch.Tensor
        Inputs (B, ...) of the first block.
    clock : callable
        Returns seconds.
    halves : bool
        Whether the two halves of a backward pass are timed, too; else all of it counts as the first half.

    Returns
    -------
    list of BlockCost
        One per block.
    """
    import torch

    inputs, outputs, forward, costs = [], [], [], []
    for number, part in enumerate(parts):
        x = x.detach().requires_grad_(number > 0)
        began = clock()
        y = part(x)
        if number == len(parts) - 1 and y.dim():  # else it is a loss already
            classes = torch.zeros(len(y), dtype=torch.long, device=y.device)
            y = torch.nn.functional.cross_entropy(y.reshape(len(y), -1), classes)
        forward.append(clock() - began)
        inputs.append(x)
        outputs.append(y)
        x = y
    for number in reversed(range(len(parts))):
        both_halves = halves and number > 0  # the images need no gradient: all of it waits for the weight gradient
        costs.append(_backward(parts[number], inputs[number], outputs.pop(), clock, both_halves))
    costs = [cost._replace(forward=seconds) for cost, seconds in zip(reversed(costs), forward, strict=True)]
    return [costs[0]._replace(input=0.0, weight=costs[0].backward), *costs[1:]]


def _backward(part, x, y, clock, halves):
    """Time the backward pass of one block, whole and then in the library's two halves."""
    import torch
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    gradient = torch.ones_like(y)
    began = clock()
    torch.autograd.backward(y, gradient, retain_graph=halves)
    whole = clock() - began
    if not halves:
        return BlockCost(0.0, whole, whole, 0.0)
    x.grad = None
    began = clock()
    _, groups = stage_backward_input((y,), [gradient], [x], part.parameters())
    halfway = clock()
    stage_backward_weight(part.parameters(), groups)
    return BlockCost(0.0, whole, halfway - began, clock() - halfway)


def _clock(device):
    """Return a function that reads seconds: of this process's CPU time, or of the GPU once it has finished."""
    if device.type != "cuda":
        return time.process_time  # another process on the same core does not count
    return partial(now, device)
