"""Estimate what every block of a model costs on a GPU that is not at hand, from its arithmetic and memory traffic.

PyTorch's own ``torch.distributed._tools.runtime_estimator`` wants a GPU in the machine and knows no V100.
Taught in notebooks/05_pipeline.ipynb.
"""

import numpy as np

from mpdemo.errors import UserError
from mpdemo.plan.cost import BlockCost
from mpdemo.plan.footprint import footprints

ROOFS = {  # floating point operations and bytes per second (data sheets, float32), seconds to launch a kernel
    "v100": (15.7e12, 0.9e12, 5e-6),
    "a100": (19.5e12, 1.555e12, 5e-6),
    "h100": (67e12, 3.35e12, 4e-6),
}


def estimate(model, sizes, image_size, gpu, *, classes=1000, channels=3, norm="batch"):
    """Estimate the cost of every block on a GPU that is not at hand.

    Each operation takes the longer of computing (operations / peak rate) and moving (bytes / bandwidth), and a
    launch: the roofline model (https://doi.org/10.1145/1498765.1498785). Real kernels stay below the roof, so shares
    and ratios are worth more than seconds.

    Parameters
    ----------
    model, image_size, classes, channels, norm
        As in `mpdemo.plan.footprint.footprints`.
    sizes : sequence of int
        Samples of a microbatch.
    gpu : str
        A key of ROOFS.

    Returns
    -------
    dict
        Size -> list of BlockCost.

    Raises
    ------
    UserError
        No figures for this GPU.
    """
    if gpu not in ROOFS:
        raise UserError(f"no figures for GPU {gpu!r}; allowed: {', '.join(ROOFS)}, or measure")
    blocks = footprints(model, image_size, classes=classes, channels=channels, norm=norm)
    return {
        size: [
            BlockCost(*(_seconds(block.passes[name], size, *ROOFS[gpu]) for name in BlockCost._fields))
            for block in blocks
        ]
        for size in sizes
    }


def _seconds(passing, size, rate, bandwidth, launch):
    """Return the seconds of one pass with `size` samples."""
    computing, moving = passing.operations @ (1, size) / rate, passing.moved @ (1, size) / bandwidth
    return float((np.maximum(computing, moving) + launch).sum())
