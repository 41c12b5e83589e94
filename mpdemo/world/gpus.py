"""The GPUs of this machine, counted without PyTorch, whose import a front end should not wait for.

Taught in notebooks/00_start_here.ipynb. Source: https://docs.nvidia.com/deploy/nvidia-smi/index.html.
"""

import functools
import os
import subprocess

ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": ""}  # in a child's environment: it sees no GPU
SECONDS = 20.0  # limit for the driver's answer; a GPU that is asleep takes some


@functools.cache
def gpus_here() -> int:
    """Return how many GPUs a child of this process sees: the driver's, or what CUDA_VISIBLE_DEVICES leaves of them."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([name for name in visible.split(",") if name]))


def gpus_wanted(devices) -> int:
    """Return how many GPUs a machine must have for a job of the course: one per device, and two for a job of one.

    The course compares one device with several. With a single GPU all of them are CPU cores, so that a device is the
    same thing in each job.
    """
    return max(2, devices)


def too_few_gpus(devices) -> bool:
    """Return whether a job's devices must be CPU cores although this machine has GPUs.

    Where the driver names none, nothing is decided here: PyTorch may know others (AMD's).
    """
    return 0 < gpus_here() < gpus_wanted(devices)
