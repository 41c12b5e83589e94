"""What GPUs promise: their memory, the most that they compute and move in a second, and their links.

The numbers are those of the vendors' data sheets, without sparsity. The memory is what the driver (nvidia-smi) shows,
a little less than the card's name says. A link's bytes go in one direction, whereas data sheets add up both; between
nodes it is one InfiniBand port for each GPU, as in DGX systems (https://docs.nvidia.com/dgx/), if it has none of its
own. The host's link is PCIe with 16 lanes. What launching a kernel takes is no vendor's promise, but what is usually
measured.
"""

from typing import NamedTuple

NVIDIA = "https://www.nvidia.com/en-us/data-center/"
ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
AMD = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"


class Gpu(NamedTuple):
    """One GPU, in bytes, operations and seconds."""

    memory: float
    peaks: dict  # floating point operations per second by precision
    moved: float  # bytes per second between its processors and its memory
    link: float  # bytes per second to another GPU of the node
    between: float  # bytes per second to another node
    host: float  # bytes per second to the host's memory
    launch: float  # seconds to launch a kernel
    source: str


def _gpu(mib, fp32, tf32, half, terabytes, link, between, host, microseconds, source):
    """Return a line of the table below, whose units are those of data sheets."""
    peaks = {"fp32": fp32 * 1e12, "tf32": tf32 * 1e12, "bf16" if tf32 else "fp16": half * 1e12}
    peaks = {precision: peak for precision, peak in peaks.items() if peak}
    links = link * 1e9, between * 1e9, host * 1e9
    return Gpu(mib * 2**20, peaks, terabytes * 1e12, *links, microseconds * 1e-6, source)


# Part of a GPU's name -> MiB; TFLOP/s: fp32, tf32, 16 bits; TB/s; GB/s in a node, between nodes, to a host; us; source
GPUS = {
    "v100":    _gpu( 32_768,  15.7,     0,  125.0,   0.9, 150, 25, 16, 5, NVIDIA + "v100/"),
    "a100":    _gpu( 40_960,  19.5, 156.0,  312.0, 1.555, 300, 25, 32, 5, NVIDIA + "a100/"),
    "a100-80": _gpu( 81_920,  19.5, 156.0,  312.0, 2.039, 300, 25, 32, 5, NVIDIA + "a100/"),
    "h100":    _gpu( 81_559,  67.0, 495.0,  989.0,  3.35, 450, 50, 64, 4, NVIDIA + "h100/"),
    "h200":    _gpu(143_771,  67.0, 495.0,  989.0,   4.8, 450, 50, 64, 4, NVIDIA + "h200/"),
    "b200":    _gpu(183_359,  75.0,  1125,   2250,   8.0, 900, 50, 64, 4, NVIDIA + "hgx/"),
    # PCIe 4.0, no NVLink
    "l40s":    _gpu( 46_068,  91.6, 183.0,  362.0, 0.864,  32, 25, 32, 4, NVIDIA + "l40s/"),
    "rtx4090": _gpu( 24_564,  82.6,  82.6,  165.2, 1.008,  32, 25, 32, 4, ADA),  # PCIe 4.0, no NVLink
    "mi300x":  _gpu(196_592, 163.4, 653.7, 1307.4,   5.3, 448, 50, 64, 4, AMD),
}  # fmt: skip


def named(device: str) -> str | None:
    """Return which line of the table a device is, by the name that PyTorch has for it; None where there is none."""
    return next((part for part in GPUS if part in device.lower()), None)
