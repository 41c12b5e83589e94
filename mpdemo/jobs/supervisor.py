"""Runs one local job and lets nothing of it survive: started by `mpdemo.jobs.local_job`, never imported by it.

torchrun's workers begin sessions of their own, so killing torchrun (or the notebook's kernel) would leave them
running. This process stands between: it adopts every orphan of the job, holds a pipe from its owner, and ends the
whole tree when the job ends, on SIGTERM, at the time limit, or when the owner dies (end of file on the pipe). It
writes how the job ended to the run's folder. Only the standard library, so that it starts at once.

    python supervisor.py '{"command": [...], "status": "FILE", "limit": 600, "signal": "USR1@60", "grace": 5,
                           "scratch": "FOLDER", "launcher": "torchrun"}'
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PRCTL = ctypes.CDLL(None).prctl
ADOPT_ORPHANS, SIGNAL_AT_PARENTS_DEATH = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG


def children(pid) -> list[int]:
    """The processes directly below one. Those further below us are adopted, so listed, once their parent is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(number) for number in file.read().split()]
    return []


def reap(process):
    """Collect ended children, the adopted ones too, and note the job's own status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)


def send(pid, number):
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def end_with(supervisor):
    """In the job's first process, before it becomes its program: end when the supervisor is killed."""
    PRCTL(SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)


def handles(pid, number) -> bool:
    """Whether a process catches a signal by now, or waits for it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        masks = [line.split()[1] for line in file if line.startswith(("SigCgt", "SigBlk"))]
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


def launcher_of(process, launcher) -> int:
    """The process that takes signals: the one that was started, or the srun that bash, with a job's file, waits for."""
    return (children(process.pid) or [process.pid])[0] if launcher == "srun" else process.pid


def can_be_warned(pid, launcher, number) -> bool:
    """Whether a warning reaches the job's program: its launcher passes it on by now, and torchrun's ranks know it."""
    if launcher != "torchrun":
        return not launcher or handles(pid, number)
    ranks = children(pid)
    return bool(ranks) and all(handles(process, number) for process in (pid, *ranks))


def watch(process, job, terminations, warnings) -> str:
    """Wait for the job's end; return how it came: ended, cancelled, timeout or orphaned.

    A warning that comes too early waits until it ends nobody who does not know it.
    """
    started = time.monotonic()
    name, _, before = (job["signal"] or "").partition("@")
    while True:
        readable = select.select([0], [], [], 0.05)[0]
        reap(process)
        if process.returncode is not None:
            return "ended"
        if terminations:
            return "cancelled"
        if readable and not os.read(0, 1):
            return "orphaned"
        left = job["limit"] - (time.monotonic() - started)
        if left <= 0:
            return "timeout"
        if name and left <= int(before):
            warnings.append(signal.Signals[f"SIG{name}"])
            name = ""
        launcher = launcher_of(process, job["launcher"])
        if warnings and can_be_warned(launcher, job["launcher"], warnings[0]):
            send(launcher, warnings.pop(0))


def end_tree(process, job):
    """Ask the job to end (torchrun ends its workers first), wait, then kill whatever is left below this process."""
    if process.returncode is None:
        send(launcher_of(process, job["launcher"]), signal.SIGTERM)
        end = time.monotonic() + job["grace"]
        while process.returncode is None and time.monotonic() < end:
            reap(process)
            time.sleep(0.02)
    for _ in range(200):
        reap(process)
        living = children(os.getpid())
        if not living:
            return
        for pid in living:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)


def main():
    job = json.loads(sys.argv[1])
    PRCTL(ADOPT_ORPHANS, 1, 0, 0, 0)
    terminations, warnings = [], []
    # Handlers, since a new program inherits SIG_IGN but no handler.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: terminations.append(True))
    signal.signal(signal.SIGUSR1, lambda number, _: warnings.append(number))
    started = time.monotonic()
    own = os.getpid()
    process = subprocess.Popen(job["command"], stdin=subprocess.DEVNULL, preexec_fn=lambda: end_with(own))
    how = watch(process, job, terminations, warnings)
    end_tree(process, job)
    shutil.rmtree(job["scratch"], ignore_errors=True)  # a torchrun that was killed leaves files there
    status = process.returncode if process.returncode is not None else 1
    status = status if status >= 0 else 128 - status
    with open(job["status"] + ".part", "w") as file:
        json.dump({"how": how, "exit_status": status, "run_time": time.monotonic() - started}, file)
    os.replace(job["status"] + ".part", job["status"])
    sys.exit(status)


if __name__ == "__main__":
    main()
