"""What every block of a model costs in time, measured on this machine (`mpdemo.plan.roofline` estimates it for a GPU).

The cost depends on the microbatch: a small one uses the device badly. So it is measured at several sizes.
Taught in notebooks/05_pipeline.ipynb.
"""

import time
from operator import add
from statistics import median
from typing import NamedTuple

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


def measure(blocks, sample, sizes, *, repeats=REPEATS, budget=60.0):
    """Measure every block at several microbatch sizes, on the device and with the threads that are set.

    Parameters
    ----------
    blocks : mpdemo.models.Blocks
        The uncut model, on its device, in training mode.
    sample : torch.Tensor
        Inputs (B, ...), at least as many as the largest size.
    sizes : sequence of int
        Samples of a microbatch.
    repeats : int
        Measurements of which the median counts; one more before them is thrown away.
    budget : float
        Seconds after which no larger size is begun; what is missing is extrapolated.

    Returns
    -------
    dict
        Size -> list of BlockCost, one per block.
    """
    parts, sizes = [blocks.stage(i, i + 1) for i in range(len(blocks))], sorted(set(sizes))
    began, each, runs = time.monotonic(), 0.0, {}
    for size in sizes:  # thrown away, but for the time it took
        spent = time.monotonic() - began
        if len(runs) >= 2 and (spent + each * size) * (1 + repeats) > budget:
            break
        _once(parts, sample[:size])
        each, runs[size] = (time.monotonic() - began - spent) / size, []
    for _ in range(repeats):  # all sizes in turn: what else the machine does meets them alike
        for size, costs in runs.items():
            costs.append(_once(parts, sample[:size]))
    for parameter in blocks.parameters():
        parameter.grad = None
    measured = {
        size: [BlockCost(*map(median, zip(*block, strict=True))) for block in zip(*costs, strict=True)]
        for size, costs in runs.items()
    }
    return {size: measured.get(size) or _extrapolate(measured, size) for size in sizes}


def _extrapolate(measured, size):
    """Continue to a larger microbatch in a straight line from the largest two that were measured.

    The line rises at least as the cost per sample of the largest one: noise must not make large batches free.
    """
    small, large = sorted(measured)[-2:]

    def line(y0, y1):
        return y1 + (size - large) * max((y1 - y0) / (large - small), 0.8 * y1 / large)

    return [BlockCost(*map(line, a, b)) for a, b in zip(measured[small], measured[large], strict=True)]


def _once(parts, x):
    """Run every block forward and backward once; return a BlockCost per block."""
    import torch

    clock, inputs, outputs, forward = _clock(x.device), [], [], []
    for number, part in enumerate(parts):
        x = x.detach().requires_grad_(number > 0)
        began = clock()
        y = part(x)
        if number == len(parts) - 1:
            y = torch.nn.functional.cross_entropy(y, torch.zeros(len(y), dtype=torch.long, device=y.device))
        forward.append(clock() - began)
        inputs.append(x)
        outputs.append(y)
        x = y
    return [
        _cost(part, inputs[number], outputs[number], number == 0, clock, forward[number])
        for number, part in enumerate(parts)
    ]


def _cost(part, x, y, first, clock, forward):
    """Time the backward pass of one block, first in the library's two halves, then whole."""
    import torch
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    gradient = torch.ones_like(y)
    began = clock()
    torch.autograd.backward(y, gradient, retain_graph=not first)
    whole = clock() - began
    if first:  # the images need no gradient: all of it waits for the weight gradient's turn
        return BlockCost(forward, whole, 0.0, whole)
    x.grad = None
    began = clock()
    _, groups = stage_backward_input((y,), [gradient], [x], part.parameters())
    halfway = clock()
    stage_backward_weight(part.parameters(), groups)
    return BlockCost(forward, whole, halfway - began, clock() - halfway)


def _clock(device):
    """Return a function that reads seconds: of this process's CPU time, or of the GPU once it has finished."""
    if device.type != "cuda":
        return time.process_time  # another process on the same core does not count
    import torch

    def synchronised():
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised
