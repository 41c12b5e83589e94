"""What every single block of a model weighs: parameters, saved activations, output. Found on fake tensors.

The planner tries thousands of cuts; it adds these numbers up instead of running a step for each
(`mpdemo.plan.memory`), and runs only the plan it chose.
"""

from dataclasses import dataclass

from mpdemo.plan.storages import count_storages

SAMPLE = 4  # samples of the fake batch; everything but the weights is proportional to them
STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # optimizer state, in values a parameter


@dataclass(frozen=True)
class Footprint:
    """One block. Bytes, the last four for one sample.

    Attributes
    ----------
    parameters : int
        How many (not bytes).
    weights, gradients : int
        Parameters and buffers; gradients of the parameters.
    saved : float
        What the forward pass leaves behind for the backward pass, the output included.
    input, output : float
        What crosses the border before and after the block.
    passing : float
        What the block's backward pass needs for a moment on top.
    """

    name: str
    parameters: int
    weights: int
    gradients: int
    saved: float
    input: float
    output: float
    passing: float


def footprints(model, image_size, *, classes=1000, channels=3, norm="batch"):
    """Return the footprint of every block of a model.

    Parameters
    ----------
    model : str
        One of ``mpdemo.models.NAMES``.
    image_size, classes, channels, norm
        As in ``mpdemo.models.build``.

    Returns
    -------
    list of Footprint
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mpdemo.models import build

    with FakeTensorMode(allow_non_fake_inputs=True), count_storages() as count:
        blocks = build(model, classes=classes, channels=channels, image_size=image_size, norm=norm)
        parts = [blocks.stage(i, i + 1) for i in range(len(blocks))]
        for parameter in blocks.parameters():
            parameter.grad = torch.empty_like(parameter)
        x = torch.empty(SAMPLE, channels, image_size, image_size)
        found = []
        for part in parts:
            # images need no gradient; everything after the first block does
            x, footprint = _one(part, x.detach().requires_grad_(bool(found)), count)
            found.append(footprint)
    return found


def _one(part, x, count):
    """Run one block forward and backward; return its output and its footprint."""
    import torch

    device = "cpu"
    before = count.live[device]
    y = part(x)
    saved = count.live[device] - before
    y_bytes = y.numel() * y.element_size()
    outside, gradient = y.detach().clone(), torch.empty_like(y)
    count.peak = dict(count.live)
    start = count.live[device]
    y.backward(gradient)
    parameters = list(part.parameters())
    weights = sum(t.numel() * t.element_size() for t in (*parameters, *part.buffers()))
    gradients = sum(p.numel() * p.element_size() for p in parameters)
    # the incoming gradient was there before; new weight gradients do not grow with the batch (see rank_peak)
    passing = y_bytes + max(0, count.peak[device] - start - gradients)
    return outside, Footprint(
        name=part.names[0],
        parameters=sum(p.numel() for p in parameters),
        weights=weights,
        gradients=gradients,
        saved=saved / SAMPLE,
        input=x.numel() * x.element_size() / SAMPLE,
        output=y_bytes / SAMPLE,
        passing=passing / SAMPLE,
    )


def rank_peak(blocks_of_rank, held, microbatch, first_batch=0.0, optimizer="sgd"):
    """Add up the peak memory of one rank.

    Parameters
    ----------
    blocks_of_rank : list of list of Footprint
        The blocks of each of its stages.
    held : float
        The most that it holds at once, in bytes: from ``Simulation.held``, with `saved_by` for each stage.
    microbatch : int
        Samples of a microbatch.
    first_batch : float
        Bytes of the batch itself, on the rank that reads it.
    optimizer : str
        A key of STATES.

    Returns
    -------
    float
        Bytes.
    """
    every = [block for stage in blocks_of_rank for block in stage]
    fixed = sum(b.weights + (1 + STATES[optimizer]) * b.gradients for b in every)
    # a block's new gradients lie beside the old ones until they are added
    return fixed + held + first_batch + max(microbatch * b.passing + b.gradients for b in every)


def saved_by(stage, microbatch):
    """Return the bytes that one microbatch leaves behind in a stage: what its blocks save, and what came in."""
    return microbatch * (stage[0].input + sum(block.saved for block in stage))
