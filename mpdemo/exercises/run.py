"""Run a reader's program in real processes, with a time limit, and say which rank did what.

The processes are forked from a server that has loaded PyTorch once (about 250 MB, ends with this process), so that a
check answers at once. The server itself computes nothing: a fork after a computation could hang.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.exercises import rank as rank_process
from mpdemo.exercises.check import Wrong
from mpdemo.jobs.record import read_text
from mpdemo.paths import root
from mpdemo.ranks.places import place_in_program
from mpdemo.world.failures import lost_a_peer
from mpdemo.world.gpus import ON_THE_CPU
from mpdemo.world.launch import free_port
from mpdemo.world.processes import child_environment

IMPORT_SECONDS = 300.0  # limit for the server's import of PyTorch, for which the first check waits
START_SECONDS = 120.0  # limit for the ranks to get ready, from then on
SECONDS = 20.0  # limit for the program, from then on; those of the exercises need about 1 s

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["torch.distributed.pipelining", "torch.optim", "torchvision"])


def run_on_ranks(path, driver=None, processes=2, seconds=None, folder=None, per_node=None) -> list:
    """Run a program in several processes that have joined a process group (gloo), one core each.

    Parameters
    ----------
    path : Path
        The reader's program.
    driver : callable, optional
        A function ``driver(program, rank, world_size)`` of an importable module. Each rank calls it with the names
        that the program defines, and its result, plain values, is returned. Without one the program runs as
        ``__main__``, makes its own process group, and what it prints is returned.
    seconds : float
        Limit for the program (default: `SECONDS`).
    folder : path, optional
        Where the ranks write (default: a temporary folder). They remove it when this process is killed.
    per_node : int
        The ranks are told that so many of them share a node (default: all).

    Returns
    -------
    list
        One result per rank.

    Raises
    ------
    Wrong
        A rank failed (its error and the line), or the program did not end (where each rank waits).
    UserError
        PyTorch was not imported in time, or a rank did not get ready: no fault of the program.
    """
    place = contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="mpdemo-exercise-")
    with place as name:
        folder, port, ranks = Path(name), str(free_port()), []
        try:
            for rank in range(processes):  # within the try: an interrupt must end those that run already
                ranks.append(_start(path, driver, folder, rank, processes, per_node or processes, port))
            _wait_for_start(ranks, folder)
            _wait(ranks, path, folder, seconds or SECONDS)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def _start(path, driver, folder, rank, processes, per_node, port):
    environment = child_environment() | {
        **ON_THE_CPU,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(min(per_node, processes - rank // per_node * per_node)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    driver = f"{driver.__module__}:{driver.__name__}" if driver else ""
    arguments = (str(path), driver, str(folder), str(root()), environment)
    process = _FORKING.Process(target=rank_process.main, args=arguments)
    with _time_limit(IMPORT_SECONDS, "PyTorch was not imported within {:.0f} s; run this cell again"):
        process.start()  # it waits for the server; what it starts too late finds no folder, and ends
    return process


@contextlib.contextmanager
def _time_limit(seconds, message):
    """Raise `UserError` in a ``with`` block that takes too long; the main thread only, which runs the cells."""

    def stop(number, frame):
        raise UserError(message.format(seconds))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _wait_for_start(ranks, folder):
    """Wait until every rank is ready for the program, or has ended."""
    end = time.monotonic() + START_SECONDS
    for rank, process in enumerate(ranks):
        while not (folder / f"rank{rank}.ready").exists() and process.exitcode is None:
            if time.monotonic() > end:
                raise UserError(f"rank {rank} was not ready within {START_SECONDS:.0f} s; run this cell again")
            time.sleep(0.01)


def _wait(ranks, path, folder, seconds):
    """Wait until all ranks have ended well; raise `Wrong` when one fails or the time is over."""
    end = time.monotonic() + seconds
    while any(process.exitcode is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
        if failed:
            time.sleep(0.3)  # another rank may be the one that failed first
            break
        if time.monotonic() > end:
            _report_waiting(ranks, path, folder, seconds)
        time.sleep(0.02)
    errors = [(rank, _error(folder, rank)) for rank, process in enumerate(ranks) if process.exitcode]
    if errors:
        own = [(rank, text) for rank, text in errors if not lost_a_peer(text)]
        rank, text = (own or errors)[0]
        raise Wrong(f"Rank {rank} failed: {text}")


def _error(folder, rank) -> str:
    if text := read_text(folder / f"rank{rank}.error"):
        return text
    lines = read_text(folder / f"rank{rank}.log").strip().splitlines()
    return lines[-1] if lines else "it ended without a message"


def _report_waiting(ranks, path, folder, seconds):
    """Ask every rank that still runs for its stack, and say where it waits."""
    running = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    for rank in running:
        os.kill(ranks[rank].pid, signal.SIGUSR2)
    time.sleep(0.3)
    places = []
    for rank in range(len(ranks)):
        report = (folder / f"rank{rank}.stack").read_text() if rank in running else ""
        places.append(f"rank {rank} {_place(report, path) if rank in running else 'is done'}")
    raise Wrong(f"After {seconds:.0f} s {'; '.join(places)}.")


def _place(report, path):
    if str(path) in report:
        return place_in_program(report, str(path), path.read_text())
    if call := re.search(r" in (send|recv)$", report, re.M):
        return f"still waits in {call[1]}, outside your program"
    return "waits for the others at its end" if " in barrier" in report else "works outside your program"
