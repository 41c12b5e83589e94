"""One core of the CPU as a device: each process takes cores that no other process of this machine has taken.

Two jobs side by side would share the first core otherwise, and leave the others idle. A core belongs to the process
that has locked its file; the lock ends with the process, however it ends. Taught in notebooks/00_start_here.ipynb.
"""

import fcntl
import os

import torch

from mpdemo.world.collectives import gather_objects
from mpdemo.world.machine import identity

LOCK = "/tmp/mpdemo-core-{}.lock"  # one for all users: they share the cores as well


def claim_cores(world, count=1):
    """Make `count` CPU cores the devices of this process: one thread each, pinned where so many cores are free.

    Without this PyTorch would use every core in a single process, and several processes could never be faster. On a
    GPU nothing is pinned. DataLoader workers share their process's cores.
    """
    if world.device.type != "cpu":
        return
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity"):  # macOS, Windows
        return
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < count * world.local_world_size:
        return
    cores = take(allowed, count)
    if cores:
        os.sched_setaffinity(0, cores)


def take(allowed, count) -> list:
    """Lock `count` of the allowed cores for this process; return their numbers, or none if fewer are free."""
    locks = {}
    for core in allowed:
        if (lock := _locked(core)) is not None:
            locks[core] = lock
        if len(locks) == count:
            return list(locks)  # the files stay open, and so locked, until this process ends
    for lock in locks.values():
        os.close(lock)
    return []


def shared_cores() -> int | None:
    """Return how many cores all processes of the world have together where they are fewer than the processes.

    None where each has its own. All ranks must call this.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    machines = gather_objects((identity(), set(cores)))
    count = len({(machine, core) for machine, cores in machines for core in cores})
    return count if count < len(machines) else None


def _locked(core) -> int | None:
    """Return the open lock file of a core; None if another process has it, or files cannot be locked here."""
    path, flags = LOCK.format(core), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            file = os.open(path, flags)
        except FileNotFoundError:  # Linux lets nobody create in /tmp what another user has there
            file = os.open(path, flags | os.O_CREAT, 0o444)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
