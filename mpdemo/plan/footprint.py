"""What every block of a model allocates and computes, found on fake tensors: they have a shape, but no storage.

Each block is run alone, forward and backward, at two microbatch sizes. All counts are straight lines in the size, so
the two runs give them for every size. `mpdemo.plan.memory` adds the blocks up to the memory of a device,
`mpdemo.plan.roofline` turns operations into seconds. Taught in notebooks/04_model_parallel.ipynb.
"""

from dataclasses import dataclass
from functools import cache
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
    parameters : int
        How many (not bytes).
    weights, gradients, largest : int
        Bytes of parameters and buffers, of the parameters' gradients, and of the largest gradient.
    input, output : int
        Bytes of one sample that cross the boundary before and after the block.
    passes : dict of str to Pass
        ``forward``; ``first_backward`` creates the gradients, ``backward`` adds to them; ``input`` and ``weight`` are
        the two halves of the backward pass, as zero-bubble schedules run them.
    """

    name: str
    parameters: int
    weights: int
    gradients: int
    largest: int
    input: int
    output: int
    passes: dict


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


@cache
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
    tuple of Footprint
    """
    from mpdemo.models import build
    from mpdemo.plan.meter import run_blocks

    shape = channels, image_size, image_size
    small, large = (
        run_blocks(lambda: build(model, classes=classes, channels=channels, image_size=image_size, norm=norm), n, shape)
        for n in SIZES
    )
    return tuple(
        Footprint(**facts, passes={name: _lines(passes[name], more[name]) for name in passes})
        for (facts, passes), (_, more) in zip(small, large, strict=True)
    )


def _lines(small, large):
    """Return a Pass from the same pass at the two SIZES, each (levels, work)."""
    columns = []
    for a, b in zip(small, large, strict=True):
        a, b = np.array(a, dtype=float), np.array(b, dtype=float)
        slope = (b - a) / (SIZES[1] - SIZES[0])
        columns.append(np.stack([a - SIZES[0] * slope, slope], axis=-1))
    levels, work = columns
    work = work.reshape(-1, 2, 2)
    return Pass(levels, work[:, 0], work[:, 1])
