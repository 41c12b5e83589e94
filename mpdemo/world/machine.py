"""What this machine is: its device, its processor, its versions; it stands beside every figure."""

import os
import platform
import socket
import time
from pathlib import Path

from mpdemo.world.gpus import ON_THE_CPU


def take_devices(processes) -> dict:
    """Return what so many processes of this one compute on: a GPU each, or else a CPU core each; and the versions.

    Where GPUs are too few, they are hidden from this process's children: all of these take CPU cores.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < processes:
        os.environ |= ON_THE_CPU
    return {
        "device": torch.cuda.get_device_name() if gpus >= processes else "one CPU core (one process, one thread)",
        "cores": os.cpu_count(),
        "processor": processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def identity() -> str:
    """What tells this machine from others: its last boot, else its name. Several nodes of a test have one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def processor() -> str:
    """The processor's name where Linux has it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
