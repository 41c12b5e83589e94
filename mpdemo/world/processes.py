"""Processes on this machine: what a child inherits, how many fit, which process is which, how all end.

A process is its number *and* the moment it started: the kernel gives the number of an ended process to another one.
PyTorch is not imported. Taught in notebooks/11_first_job.ipynb.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from mpdemo.errors import UserError
from mpdemo.world.family import PRCTL

SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG
PYTHONS = ("py", "Py", "pt_", "torchrun")  # how the name of a torchrun's process begins
PROCESS_MIB = 400  # of memory that one process with PyTorch takes
# Set by a launcher or by an enclosing Slurm job for its own processes; a child that inherits them believes it is one.
LAUNCHER_VARIABLES = (
    *("SLURM", "SBATCH", "SRUN", "SALLOC", "PMI", "PET_", "TORCHELASTIC"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_"),
)


def child_environment(*keep) -> dict:
    """Return this process's environment without the variables of a launcher, and with this Python first on the path."""
    kept = {
        name: v for name, v in os.environ.items() if name in keep or not name.startswith(LAUNCHER_VARIABLES)
    }
    return kept | {"PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"}


def cores_here() -> int:
    """Return how many cores this process may use, or what `MPDEMO_CORES` says instead, such as two on a single one."""
    said = os.environ.get("MPDEMO_CORES")
    if said and not said.isdecimal():
        raise UserError(
            f"MPDEMO_CORES = {said!r} is not allowed; allowed: a number of processes, such as 2"
        )
    return int(said) if said else len(os.sched_getaffinity(0))


def check_room(processes, oversubscribe=None):
    """Refuse more processes than this machine has cores or memory for, before any is started."""
    cores, free = cores_here(), psutil.virtual_memory().available // 2**20
    fitting = max(1, min(cores, free // PROCESS_MIB))
    if processes > fitting and not oversubscribe:
        more = "" if oversubscribe is None else ", or say oversubscribe where more are meant"
        raise UserError(
            f"{processes} processes need {processes} CPU cores and {processes * PROCESS_MIB} MiB; available: {cores} "
            f"cores, {free} MiB; start at most {fitting}{more}"
        )


def start_time(pid) -> float | None:
    """Return when a process started, in seconds after the boot; None if there is none, or it is a zombie."""
    # seconds since 1970 change when the clock is set
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            # the kernel counts hundredths of a second
            return round(process.create_time() - psutil.boot_time(), 2)
    return None


def is_running(pid, started) -> bool:
    """Whether the process of this number and start time still runs."""
    return started is not None and start_time(pid) == started


def has_open(pid, file) -> bool:
    """Whether a process has a file open, by the file's number on its disk; a link is no such file."""
    with contextlib.suppress(OSError):
        own = os.lstat(file)
        return any(os.path.samestat(own, os.stat(entry.path)) for entry in os.scandir(f"/proc/{pid}/fd"))
    return False


def handles(pid, number) -> bool:
    """Whether a process catches a signal by now, or waits for it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        masks = [line.split()[1] for line in file if line.startswith(("SigCgt", "SigBlk"))]
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


def end_processes(processes, first_signal, seconds=5.0):
    """Send a signal to each process, wait for all, and kill those that are left; return when they are gone."""
    processes = list(processes)

    def living():
        return [pid for pid, started in processes if is_running(pid, started)]

    for number, patience in ((first_signal, seconds), (signal.SIGKILL, 2.0)):
        for pid in living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + patience
        while living() and time.monotonic() < end:
            time.sleep(0.02)
    for pid, _ in processes:
        with contextlib.suppress(ChildProcessError):
            # take the exit status of our own children: else they stay as zombies
            os.waitpid(pid, os.WNOHANG)


def end_with_parent():
    """End when a torchrun is killed: it would leave its processes behind. Nothing to do under srun or alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    be_killed_with_parent()
    try:  # it may be gone already; in a container process 1 may be torchrun itself
        parent = psutil.Process(os.getppid())
        gone = parent.name() == "systemd" or (parent.pid == 1 and not parent.name().startswith(PYTHONS))
    except psutil.NoSuchProcess:
        gone = True
    if gone:
        os._exit(1)


def be_killed_with_parent():
    """Ask the system to kill this process when its parent ends, also after an exec (``preexec_fn`` of a child)."""
    PRCTL(SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)


def clean_up_on_signals():
    """Let SIGTERM and SIGHUP end this process by `SystemExit`: ``finally`` is then obeyed, whatever signal follows."""
    ends = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
    ]

    def end(number, frame):
        for each in ends:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in ends:
        signal.signal(number, end)


def end(status=0):
    """End this process with an exit status; Python would first spend a second on taking PyTorch's modules apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def lost_a_peer(error) -> bool:
    """Whether an error only reports that another rank is gone, so that it is not this rank's own."""
    # BrokenPipeError says that this process's output is no longer read, as behind ``| head``
    messages = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "remote process exited",
    )
    return not isinstance(error, BrokenPipeError) and any(message in str(error) for message in messages)
