"""The processes below this one, at any depth: adopt what they leave, take their exit statuses, end them all.

It needs Python alone: the server of `mpdemo same`, which runs in another environment, loads it by its path.
"""

import contextlib
import ctypes
import os
import signal
import socket
import time

PRCTL = ctypes.CDLL(None).prctl
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


def held_port() -> socket.socket:
    """Return a socket whose port no other process can get, but rank 0 can listen on; keep it as long as the ranks live.

    A port that is only looked up can be gone when rank 0 has imported PyTorch: any connection of anybody may take it.
    With SO_REUSEADDR two sockets may have one port as long as one of them listens; PyTorch's store sets it, too.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def adopt_orphans():
    """Become the parent of each process below this one whose own parent ends, also of one with a session of its own."""
    PRCTL(ADOPT_ORPHANS, 1, 0, 0, 0)


def children(pid) -> list[int]:
    """Return the processes directly below one; those further below us are adopted once their parent is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(number) for number in file.read().split()]
    return []


def send(pids, number):
    """Send a signal to processes that may be gone."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def reap() -> dict[int, int]:
    """Collect the children that have ended, the adopted ones too; return their exit statuses, negative by a signal."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return statuses


def end_children(known=()):
    """Kill whatever is left below this process, for four seconds at most; /proc may not list the `known` children."""
    known = set(known)
    for _ in range(200):
        known -= reap().keys()
        if not (living := children(os.getpid()) or known):
            return
        send(living, signal.SIGKILL)
        time.sleep(0.02)
