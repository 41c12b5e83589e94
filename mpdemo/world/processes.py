"""End processes for certain, and never the wrong ones: a process is its number and the moment it started."""

import contextlib
import os
import signal
import time
from pathlib import Path

STRAYS = (
    "slurmstepd",
    "slurmd",
    "slurm_script",
    "srun",
    "salloc",
)  # srun and salloc wait on for a cluster that is gone


def start_time(pid) -> str | None:
    """When a process started, as the kernel counts; None if there is none. With the pid it names one process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def end_processes(pids, first_signal, seconds=5, inside=False):
    """Signal each process, wait for all, and kill what is left; `pids` maps a name to (pid, start time).

    With `inside`, the signal goes to the first process inside the namespaces: its end is the end of all others there,
    and the waiting `unshare` outside then ends by itself, so that no zombie is left.
    """

    def living():
        return [pid for pid, born in pids.values() if start_time(pid) == born]

    for sign, wait, child in ((first_signal, seconds, inside), (signal.SIGKILL, 2, False)):
        for pid in living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(first_child(pid) or pid if child else pid, sign)
        end = time.monotonic() + wait
        while living() and time.monotonic() < end:
            time.sleep(0.02)
    for pid, _ in pids.values():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def first_child(pid) -> int | None:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return None


def end_strays(slurm_conf):
    """Kill what still runs for the cluster of this configuration file: its jobs' processes and waiting clients."""
    mark, job = f"SLURM_CONF={slurm_conf}\0".encode(), b"SLURM_CLUSTER_NAME=throwaway\0"
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ, name = (entry / "environ").read_bytes(), (entry / "comm").read_text().strip()
        except OSError:
            continue
        if mark in environ and (job in environ or name in STRAYS):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)
