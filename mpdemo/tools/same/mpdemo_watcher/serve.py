"""Imports PyTorch once, and forks worlds of ranks from it: an order comes in by a pipe, an answer goes out.

It needs PyTorch alone. When its owner is gone (end of file), it ends all ranks and itself. A process above it, of which
a script knows nothing, ends what is left if a script kills the server.
"""

import atexit
import contextlib
import os
import platform
import runpy
import shutil
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch

from . import watch
from .notes import has_ended, note, of_error

GRACE = 10.0  # seconds for the other ranks when one has ended
family = SimpleNamespace(**runpy.run_path(sys.argv[3]))  # of mpdemo, which may not be installed here
KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def fork(order, rank, port, owner) -> int:
    """Start one rank, in a process group of its own: it runs the script, writes into files of its own, and ends."""
    if number := os.fork():
        return number
    os.setpgid(0, 0)
    family.PRCTL(KILLED_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    owner.close()
    size = order["processes"]
    place = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank)
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size)
    place |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"TORCHELASTIC_RUN_ID": "same", "TORCHELASTIC_RESTART_COUNT": 0}
    order["place"] = {name: str(value) for name, value in place.items()}
    os.environ.update(order["place"])
    status = 1
    try:
        for place, name in (
            (0, os.devnull),
            (1, f"{order['notes']}/{rank}.out"),
            (2, f"{order['notes']}/{rank}.err"),
        ):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), place)
        sys.stdout.reconfigure(line_buffering=True)
        watch.run(order, rank)
        status = 0
        atexit._run_exitfuncs()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        said = "" if isinstance(error.code, int) else str(error.code)
        print(said, file=sys.stderr)
        note("failed", **of_error(error) | {"said": said})
    except BaseException as error:
        traceback.print_exc()
        note("failed", **of_error(error))
    finally:
        sys.stdout.flush()
        has_ended(status)
        os._exit(status)


def world(order, owner) -> dict:
    """Run a world to its end, or as long as it has something new to say; return how it ended."""
    held = family.held_port()
    ranks = [fork(order, rank, held.getsockname()[1], owner) for rank in range(order["processes"])]
    ended, statuses, seen, heard, limit = {}, {}, None, time.monotonic(), order["limit"]
    while len(statuses) < len(ranks) and time.monotonic() < heard + (
        min(limit, GRACE) if statuses else limit
    ):
        ended |= family.reap()
        statuses = {k: ended[rank] for k, rank in enumerate(ranks) if rank in ended}
        news = (
            statuses,
            sum(os.stat(file).st_size for file in os.scandir(order["notes"]) if ".jsonl" in file.name),
        )
        if news != seen:
            seen, heard = news, time.monotonic()
        if owner.poll(0.02):  # nothing is asked for meanwhile: it is gone
            break
    living = [rank for rank in ranks if rank not in ended]
    family.end_children(living)  # with what they have started, and what those that have ended have left
    return {"how": "ended" if len(statuses) == len(ranks) else "silent", "statuses": statuses}


def main():
    """Answer orders until the owner is gone, then remove the owner's folder."""
    owner = Connection(int(sys.argv[1]))
    family.adopt_orphans()
    if server := os.fork():
        owner.close()
        status = os.waitpid(server, 0)[1]
        family.end_children()
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        os._exit(os.WTERMSIG(status))
    family.adopt_orphans()
    torch.optim.SGD([torch.zeros(1)], 1.0)  # the first optimizer imports a second's worth of modules
    # texts, and of no class of PyTorch: the other side may have none
    owner.send({"torch": str(torch.__version__), "python": platform.python_version()})
    with contextlib.suppress(EOFError, OSError):
        while True:
            owner.send(world(owner.recv(), owner))
    os._exit(0)  # without the two seconds in which PyTorch takes itself down


if __name__ == "__main__":
    main()
