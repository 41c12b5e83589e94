"""What this machine computes with: its GPUs, its processor, its name. PyTorch is imported only where it must be.

Taught in notebooks/10_two_devices.ipynb. Source: https://docs.nvidia.com/deploy/nvidia-smi/index.html.
"""

import functools
import os
import platform
import re
import subprocess
import time
from pathlib import Path

ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": ""}  # in a child's environment: it sees no GPU
SECONDS = 20.0  # limit for the driver's answer; a GPU that is asleep takes some


@functools.cache
def gpus_here() -> int:
    """Return how many GPUs a child of this process sees: the driver's, or what CUDA_VISIBLE_DEVICES leaves of them."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = count if visible is None else len(set(visible.split(",")) - {"", "-1"})  # -1 hides all of them
    return min(count, listed)


def gpus_wanted(devices) -> int:
    """Return how many GPUs a machine must have for a job: one per device, and two for a job of one, for comparison."""
    return max(2, devices)


def too_few_gpus(devices) -> bool:
    """Return whether a job's devices must be CPU cores although the driver names GPUs (it does not name AMD's)."""
    return 0 < gpus_here() < gpus_wanted(devices)


def shared_cores() -> int | None:
    """Return how many cores the world's processes share, or None if each has its own; all ranks must call this."""
    from mpdemo.world.collectives import gather_objects

    machines = gather_objects((identity(), os.sched_getaffinity(0)))
    count = len({(machine, core) for machine, cores in machines for core in cores})
    return count if count < len(machines) else None


def take_devices(processes) -> dict:
    """Return what so many child processes will compute on, and the versions; too few GPUs are hidden from them."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < processes:
        os.environ |= ON_THE_CPU
    return {
        "device": torch.cuda.get_device_name()
        if gpus >= processes
        else "one CPU core (one process, one thread)",
        "cores": os.cpu_count(),
        "processor": processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def identity() -> str:
    """Return the boot's id, which differs between machines; a test's nodes share one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def processor() -> str:
    """The processor's name where the kernel tells it, else its architecture."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return names[0] if names else platform.machine()
