"""Runs one local job and lets nothing of it survive: started by `mpdemo.jobs.local_job`, never imported by it.

torchrun's workers begin sessions of their own, so killing torchrun (or the notebook's kernel) would leave them
running. This process stands between: it adopts every orphan of the job (Linux), holds a pipe from its owner, and ends
the whole tree when the job ends, when it is told to (SIGTERM), when the time is over, or when the owner dies (end of
file on the pipe). It writes how it ended to the run's folder. Only the standard library, so that it starts at once.

    python supervisor.py '{"command": [...], "status": "FILE", "limit": 600, "signal": ["USR1", 60], "grace": 5,
                           "scratch": "FOLDER"}'
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

ADOPT_ORPHANS = 36  # prctl's PR_SET_CHILD_SUBREAPER


def descendants() -> list[int]:
    """Every process below this one."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, timeout=10).stdout
    children = {}
    for line in listing.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def linux_descendants() -> list[int]:
    """The same from /proc, without starting a process."""
    found, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    below = [int(word) for word in file.read().split()]
                found += below
                todo += below
        except OSError:
            pass
    return found


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


def watch(process, job, told) -> str:
    """Wait for the job's end; return the word for how it came: ended, cancelled, timeout or orphaned."""
    started = time.monotonic()
    warning = job.get("signal")
    while True:
        readable = select.select([0], [], [], 0.05)[0]
        reap(process)
        if process.returncode is not None:
            return "ended"
        if told:
            return "cancelled"
        if readable and not os.read(0, 1):
            return "orphaned"
        left = job["limit"] - (time.monotonic() - started)
        if left <= 0:
            return "timeout"
        if warning and left <= warning[1]:
            send(process.pid, getattr(signal, "SIG" + warning[0]))
            warning = None


def end_tree(process, living, grace):
    """Ask the job to end (torchrun ends its workers first), wait, then kill whatever is left below this process."""
    if process.returncode is None:
        send(process.pid, signal.SIGTERM)
        end = time.monotonic() + grace
        while process.returncode is None and time.monotonic() < end:
            reap(process)
            time.sleep(0.02)
    for _ in range(200):
        reap(process)
        left = living()
        if not left:
            return
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)


def main():
    job = json.loads(sys.argv[1])
    living = descendants
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
        living = linux_descendants
    told = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))

    def own_signals():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    started = time.monotonic()
    process = subprocess.Popen(job["command"], stdin=subprocess.DEVNULL, preexec_fn=own_signals)
    how = watch(process, job, told)
    end_tree(process, living, job["grace"])
    shutil.rmtree(job["scratch"], ignore_errors=True)  # a torchrun that was killed leaves files there
    status = process.returncode if process.returncode is not None else 1
    status = status if status >= 0 else 128 - status
    with open(job["status"] + ".part", "w") as file:
        json.dump({"how": how, "exit_status": status, "run_time": time.monotonic() - started}, file)
    os.replace(job["status"] + ".part", job["status"])
    sys.exit(status)


if __name__ == "__main__":
    main()
