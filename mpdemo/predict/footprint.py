"""What every block of a model allocates, computes and moves, found on fake tensors: they have a shape, but no storage.

Each block is run alone, forward and backward, at two microbatch sizes. All counts are straight lines in the size, so
the two runs give them for every size. They tell the time on a GPU that is not here (`costs`) and say where a cut may
lie. Taught in notebooks/05_pipeline.ipynb.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from mpdemo.predict.efficiency import AT_BEST, MEASURED, OPTIMIZER, Efficiency
from mpdemo.world.gpus import GPUS

MIB = 2**20
RESERVE = 768 * MIB  # of a GPU's memory, kept for the CUDA context (about 500 MiB) and for workspaces
UPDATES = {"sgd": 3, "momentum": 8, "adamw": 20}  # values that PyTorch's default (foreach) moves per parameter
STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # optimizer state, in values per parameter
SIZES = 2, 8  # microbatch sizes of the two runs


class ModelSpec(NamedTuple):
    """A model of ``mpdemo.settings.MODELS`` and its images."""

    model: str
    image_size: int = 224
    classes: int = 1000
    channels: int = 3
    norm: str = "batch"


class Roof(NamedTuple):
    """What a GPU does per second at most (data sheets), and the seconds to launch a kernel."""

    convolutions: float  # floating point operations
    products: float  # floating point operations of matrix products
    half: float | None  # floating point operations in 16 bits; None where it has no units for them
    moved: float  # bytes
    launch: float
    efficiency: Efficiency = AT_BEST  # what kernels reach of it


def roof(gpu, efficiency=None) -> Roof:
    """Return the roof of one of `GPUS`, and what kernels reach of it: without `efficiency` what is known of that GPU.

    In float32 PyTorch lets cuDNN compute convolutions in TF32 by default, but no other matrix product
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere).
    """
    sheet = GPUS[gpu]
    fp32, half = sheet.peaks["fp32"], sheet.peaks.get("bf16")
    efficiency = efficiency or MEASURED.get(gpu, AT_BEST)
    return Roof(sheet.peaks.get("tf32", fp32), fp32, half, sheet.moved, sheet.launch, efficiency)


def kernel_seconds(work, roof) -> float | None:
    """Return the seconds of kernels: each computes or moves, whichever takes longer, and is launched.

    `work` are rows as `mpdemo.predict.meter.Kernels` notes them. None where the GPU has no units for one of them.
    """
    convolutions, products, half, moved, kinds = work.T
    if half.any() and not roof.half:
        return None
    kinds, reached = kinds.astype(int), roof.efficiency
    computing = convolutions / roof.convolutions + products / roof.products + half / (roof.half or 1)
    computing /= reached.computing(kinds, convolutions + products + half)
    return float((np.maximum(computing, moved / roof.moved / reached.moving(kinds)) + roof.launch).sum())


def update_seconds(optimizer, trained, roof) -> float:
    """Return the seconds in which an optimizer updates weights that have so many bytes of gradients."""
    return kernel_seconds(np.array([[0.0, 0.0, 0.0, UPDATES[optimizer] * trained, OPTIMIZER]]), roof)


class BlockCost(NamedTuple):
    """Seconds that one block needs for one microbatch."""

    forward: float
    backward: float

    @property
    def both(self):
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True, eq=False)
class Footprint:
    """One block, in bytes."""

    name: str
    weights: int  # parameters and buffers
    gradients: int
    largest: int  # gradient
    input: int  # of one sample, as `output`: what crosses the boundary before and after the block
    output: int
    lines: dict  # `saved` by a forward pass, `backward` above the start at the peak: without samples, and per sample
    work: dict  # `forward`, `backward` -> (kernels, 5, 2): the rows of `meter.Kernels`, as such lines

    def bytes(self, what, size):
        """Return ``saved`` or ``backward`` for a microbatch of `size` samples."""
        return float(self.lines[what] @ (1, size))

    def seconds(self, kind, size, roof):
        """Return the seconds of a pass of `size` samples."""
        return kernel_seconds(self.work[kind] @ (1, size), roof)


@cache
def footprints(spec) -> tuple:
    """Return the footprint of every block of a model."""
    from mpdemo.predict import meter

    small, large = (meter.run_blocks(spec, size) for size in SIZES)
    result = []
    for (facts, lines, work), (_, more_lines, more_work) in zip(small, large, strict=True):
        lines = {name: _line(lines[name], more_lines[name]) for name in lines}
        work = {kind: _line(sorted(work[kind]), sorted(more_work[kind])).reshape(-1, 5, 2) for kind in work}
        result.append(Footprint(**facts, lines=lines, work=work))
    return tuple(result)


def _line(small, large):
    """Return numbers at the two SIZES as lines: their values at size 0, and their slopes, in a last dimension."""
    small, large = np.array(small, dtype=float), np.array(large, dtype=float)
    slope = (large - small) / (SIZES[1] - SIZES[0])
    return np.stack([small - SIZES[0] * slope, slope], axis=-1)


@cache
def costs(spec, size, gpu) -> list:
    """Estimate the cost of every block, in float32, for a microbatch of `size` on a GPU that is not here.

    Each operation takes the longer of computing (operations / peak rate) and moving (bytes / bandwidth), and a
    launch: the roofline model (https://doi.org/10.1145/1498765.1498785). Real kernels stay below the roof, so shares
    and ratios are worth more than seconds.
    """
    kinds = BlockCost._fields
    return [BlockCost(*(block.seconds(kind, size, roof(gpu)) for kind in kinds)) for block in footprints(spec)]
