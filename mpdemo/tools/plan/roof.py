"""What a GPU does per second at most, and how long kernels take there (the roofline model)."""

from typing import NamedTuple

import numpy as np

from mpdemo.tools.plan.efficiency import OPTIMIZER, Efficiency, known_of
from mpdemo.tools.plan.gpus import GPUS

MIB = 2**20
RESERVE = 768 * MIB  # of a GPU's memory, kept for the CUDA context (about 500 MiB) and for workspaces


class Optimizer(NamedTuple):
    """What an optimizer keeps and moves, in numbers per parameter."""

    states: int
    moved: int  # by an update
    besides: int = 0  # held while it updates: what PyTorch's default (foreach) computes beside the states


OPTIMIZERS = {
    "sgd": Optimizer(0, 3),
    "momentum": Optimizer(1, 8),
    "adamw": Optimizer(2, 20, 1),
    "adamw-fused": Optimizer(2, 7),
}


class Roof(NamedTuple):
    """What a GPU does per second at most (data sheets), and the seconds to launch a kernel."""

    convolutions: float  # floating point operations
    products: float  # floating point operations of matrix products
    half: float | None  # floating point operations in 16 bits; None where it has no units for them
    moved: float  # bytes
    launch: float
    efficiency: Efficiency  # what kernels reach of it


def roof(gpu, efficiency=None, tf32=False) -> Roof:
    """Return the roof of one of `GPUS`, and what kernels reach of it: without `efficiency` what is known of that GPU.

    In float32 PyTorch lets cuDNN compute convolutions in TF32 by default, but no other matrix product
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere) unless it's told to.
    """
    sheet = GPUS[gpu]
    fp32, half = sheet.peaks["fp32"], sheet.peaks.get("bf16", sheet.peaks.get("fp16"))
    convolutions = sheet.peaks.get("tf32", fp32)
    products = convolutions if tf32 else fp32
    return Roof(convolutions, products, half, sheet.moved, sheet.launch, efficiency or known_of(gpu))


def kernel_seconds(work, roof) -> float | None:
    """Return the seconds of kernels: each computes or moves, whichever takes longer, and is launched.

    `work` are rows as `mpdemo.tools.plan.kernels.Kernels` notes them. None where the GPU has no units for one of them.
    """
    convolutions, products, half, moved, kinds = work.T
    if half.any() and not roof.half:
        return None
    kinds, reached = kinds.astype(int), roof.efficiency
    computing = convolutions / roof.convolutions + products / roof.products + half / (roof.half or 1)
    computing /= reached.computing(kinds, convolutions + products + half)
    return float((np.maximum(computing, moved / roof.moved / reached.moving(kinds)) + roof.launch).sum())


def update_seconds(optimizer, trained, roof, precision="bf16") -> float:
    """Return the seconds in which an optimizer updates weights that have so many bytes of gradients.

    A GradScaler, which float16 needs, reads and writes the gradients once more.
    """
    moved = OPTIMIZERS[optimizer].moved + 2 * (precision == "fp16")
    return kernel_seconds(np.array([[0.0, 0.0, 0.0, moved * trained, OPTIMIZER]]), roof)
