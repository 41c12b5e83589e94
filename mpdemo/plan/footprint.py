"""What every block of a model allocates, computes and moves, found on fake tensors: they have a shape, but no storage.

Each block is run alone, forward and backward, at two microbatch sizes. All counts are straight lines in the size, so
the two runs give them for every size. They tell the time on a GPU that is not here (`costs`) and say where a cut may
lie; what a whole training holds is counted by running it (dry_run.py). Taught in notebooks/05_pipeline.ipynb.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from mpdemo.world.devices import PEAKS

SIZES = 2, 8  # microbatch sizes of the two runs
ROOFS = {"v100": (0.9e12, 5e-6), "a100": (1.555e12, 5e-6), "h100": (3.35e12, 4e-6)}  # bytes/s; s to launch a kernel


class Roof(NamedTuple):
    """What a GPU does per second at most in one precision (data sheets), and the seconds to launch a kernel."""

    convolutions: float  # floating point operations
    products: float  # floating point operations of matrix products
    moved: float  # bytes of a float32 tensor
    launch: float


def roof(gpu, precision) -> Roof | None:
    """Return the roof of a key of ROOFS; None where the GPU has no units for the precision.

    In float32 PyTorch lets cuDNN compute convolutions in TF32 by default, but no other matrix product
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere). In bf16 a tensor has half the bytes.
    """
    (bandwidth, launch), sheet = ROOFS[gpu], PEAKS[gpu]
    if precision == "fp32":
        return Roof(sheet.get("tf32", sheet["fp32"]), sheet["fp32"], bandwidth, launch)
    return Roof(sheet["bf16"], sheet["bf16"], 2 * bandwidth, launch) if "bf16" in sheet else None


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
    parameters: int  # how many, not bytes
    weights: int  # parameters and buffers
    gradients: int
    largest: int  # gradient
    input: int  # of one sample, as `output`: what crosses the boundary before and after the block
    output: int
    lines: dict  # `saved` by a forward pass, `backward` above the start at the peak: without samples, and per sample
    work: dict  # `forward`, `backward` -> (kernels, 3, 2): operations of convolutions, of products, bytes: such lines

    def bytes(self, what, size):
        """Return ``saved`` or ``backward`` for a microbatch of `size` samples."""
        return float(self.lines[what] @ (1, size))

    def seconds(self, kind, size, roof):
        """Return the seconds of a pass: each kernel computes or moves, whichever takes longer, and is launched."""
        convolutions, products, moved = (self.work[kind] @ (1, size)).T
        computing = convolutions / roof.convolutions + products / roof.products
        return float((np.maximum(computing, moved / roof.moved) + roof.launch).sum())


@cache
def footprints(spec) -> tuple:
    """Return the footprint of every block of a model."""
    from mpdemo.plan import meter

    small, large = (meter.run_blocks(spec, size) for size in SIZES)
    result = []
    for (facts, lines, work), (_, more_lines, more_work) in zip(small, large, strict=True):
        lines = {name: _line(lines[name], more_lines[name]) for name in lines}
        work = {kind: _line(sorted(work[kind]), sorted(more_work[kind])).reshape(-1, 3, 2) for kind in work}
        result.append(Footprint(**facts, lines=lines, work=work))
    return tuple(result)


def _line(small, large):
    """Return numbers at the two SIZES as lines: their values at size 0, and their slopes, in a last dimension."""
    small, large = np.array(small, dtype=float), np.array(large, dtype=float)
    slope = (large - small) / (SIZES[1] - SIZES[0])
    return np.stack([small - SIZES[0] * slope, slope], axis=-1)


@cache
def costs(spec, size, gpu, precision="fp32") -> list:
    """Estimate the cost of every block for a microbatch of `size` on a GPU that is not here; [] where it has no roof.

    Each operation takes the longer of computing (operations / peak rate) and moving (bytes / bandwidth), and a
    launch: the roofline model (https://doi.org/10.1145/1498765.1498785). Real kernels stay below the roof, so shares
    and ratios are worth more than seconds.
    """
    if not (limits := roof(gpu, precision)):
        return []
    kinds = BlockCost._fields
    return [BlockCost(*(block.seconds(kind, size, limits) for kind in kinds)) for block in footprints(spec)]
