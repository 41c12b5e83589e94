"""What every block of a model allocates and computes, found on fake tensors: they have a shape, but no storage.

Each block is run alone, forward and backward, at two microbatch sizes. All counts are straight lines in the size, so
the two runs give them for every size. `mpdemo.plan.memory` adds the blocks up to the memory of a device,
`mpdemo.plan.roofline` turns operations into seconds. Taught in notebooks/04_model_parallel.ipynb.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

SIZES = 2, 8  # microbatch sizes of the two runs


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass of one block. Each row is a line: the value without samples, and what every sample adds.

    Attributes
    ----------
    levels : np.ndarray
        (allocations + 1, 2); bytes above the start, after every allocation and at the end.
    operations, moved : np.ndarray
        (kernels, 2); floating point operations, and bytes read and written.
    """

    levels: np.ndarray
    operations: np.ndarray
    moved: np.ndarray

    def peak_and_change(self, size):
        """Return the most bytes above the start, and the bytes more at the end, for `size` samples."""
        levels = self.levels @ (1, size)
        return levels.max(), levels[-1]


@dataclass(frozen=True, eq=False)
class Footprint:
    """One block.

    Attributes
    ----------
    name : str
    shapes : dict
        Name of a parameter -> its shape.
    weights, gradients, largest : int
        Bytes of parameters and buffers, of the parameters' gradients, and of the largest gradient.
    input, output : int
        Bytes of one sample that cross the boundary before and after the block.
    passes : dict of str to Pass
        ``forward``; ``first_backward`` creates the gradients, ``backward`` adds to them; ``input`` and ``weight`` are
        the two halves of the backward pass, as zero-bubble schedules run them.
    buffers : int
        Bytes of the buffers alone, such as batch norm's averages.
    """

    name: str
    shapes: dict
    weights: int
    gradients: int
    largest: int
    input: int
    output: int
    passes: dict
    buffers: int = 0

    @property
    def parameters(self):
        """How many (not bytes)."""
        return sum(prod(shape) for shape in self.shapes.values())


class Needs(NamedTuple):
    """Bytes of one block for one microbatch.

    `saved` is what the forward pass leaves behind, the output included; `output_only` is the output, where the block
    itself does not need it for its backward pass, else 0. `kept_by_input` are the gradients which the input half of
    the backward pass keeps for the weight half. The peaks are above what was allocated before the pass.
    """

    saved: float
    output_only: float
    kept_by_input: float
    forward_peak: float
    first_backward_peak: float
    backward_peak: float
    input_peak: float
    weight_peak: float


@cache
def needs(block, size) -> Needs:
    """Return what a Footprint's passes need for a microbatch of `size` samples."""
    (forward, saved), (first, _), (backward, freed), (input_peak, kept), (weight, _) = (
        block.passes[name].peak_and_change(size)
        for name in ("forward", "first_backward", "backward", "input", "weight")
    )
    return Needs(saved, saved + freed, kept, forward, first, backward, input_peak, weight)


def footprints(model, image_size, *, classes=1000, channels=3, norm="batch", precision="fp32", checkpointing=False):
    """Return the footprint of every block of a model.

    Parameters
    ----------
    model : str or callable
        One of ``mpdemo.settings.MODELS``, or a function without arguments that returns the ``mpdemo.models.Blocks``
        (`mpdemo.models.own.OwnModel` says the shape and the type of its samples, and is built for a batch size).
    image_size, classes, channels, norm
        As in ``mpdemo.models.build``.
    precision : {"fp32", "bf16"}
        Type that autocast computes in.
    checkpointing : bool
        Whether the backward pass computes each block once more. Not for schedules that split the backward pass.

    Returns
    -------
    tuple of Footprint
    """
    return _footprints(model, image_size, classes, channels, norm, precision, checkpointing)


@cache  # of values, however they were given: the same blocks are run once
def _footprints(model, image_size, classes, channels, norm, precision, checkpointing):
    from mpdemo.plan.meter import run_blocks

    shape = getattr(model, "input_shape", (channels, image_size, image_size))
    kind = getattr(model, "input_type", None)  # PyTorch's float by default
    options = {"classes": classes, "channels": channels, "image_size": image_size, "norm": norm}
    built_for = getattr(model, "at", lambda size: model)
    small, large = (run_blocks(_build(built_for(n), precision, checkpointing, options), n, shape, kind) for n in SIZES)
    return tuple(
        Footprint(**facts, passes={name: _lines(passes[name], more[name]) for name in passes})
        for (facts, passes), (_, more) in zip(small, large, strict=True)
    )


def _build(model, precision, checkpointing, options):
    """Return a function that builds the model."""
    import torch

    from mpdemo.models import build

    def blocks():
        built = model() if callable(model) else build(model, **options)
        built.precision = torch.bfloat16 if precision == "bf16" else None
        built.checkpointing = checkpointing
        return built

    return blocks


def _lines(small, large):
    """Return a Pass from the same pass at the two SIZES, each (levels, work)."""
    columns = []
    sorted_work = sorted(small[1]), sorted(large[1])  # the library runs the weights' halves in any order
    for a, b in ((small[0], large[0]), sorted_work):
        a, b = np.array(a, dtype=float), np.array(b, dtype=float)
        slope = (b - a) / (SIZES[1] - SIZES[0])
        columns.append(np.stack([a - SIZES[0] * slope, slope], axis=-1))
    levels, work = columns
    work = work.reshape(-1, 2, 2)
    return Pass(levels, work[:, 0], work[:, 1])
