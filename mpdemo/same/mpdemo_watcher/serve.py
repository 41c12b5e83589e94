"""Imports PyTorch once, and forks worlds of ranks from it: an order per line comes in, an answer per line goes out.

It needs PyTorch alone. When its owner is gone (end of file), it ends all ranks and itself.
"""

import atexit
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback

import torch
from mpdemo_watcher import watch

GRACE = 5.0  # seconds for the other ranks when one has failed
KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork_rank(order, rank, port, answers) -> int:
    """Run the script as one rank in a process group of its own; return its number."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # both set it: who is first does not matter
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(KILLED_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        os.close(answers)
        size = order["processes"]
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        place |= {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": size, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        place |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "same", "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ.update({name: str(value) for name, value in place.items()})
        be_rank(order, rank)
    finally:
        os._exit(1)


def be_rank(order, rank):
    """Run the script as one rank, which writes into files of its own, and end this process."""
    status = 1
    try:
        for place, name in ((0, os.devnull), (1, f"{order['notes']}/{rank}.out"), (2, f"{order['notes']}/{rank}.err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), place)
        sys.stdout.reconfigure(line_buffering=True)
        status = watch.run(order, rank)
        atexit._run_exitfuncs()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        print(*([] if isinstance(error.code, int) else [error.code]), file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with open(f"{order['notes']}/{rank}.status", "w") as file:
            file.write(str(status))
        os._exit(status)


def world(order, answers) -> dict:
    """Run a world to its end, or as long as it has something new to say; return how it ended."""
    ranks = range(order["processes"])
    port = free_port()
    pids = [fork_rank(order, rank, port, answers) for rank in ranks]
    statuses, heard, size, failed = {}, time.monotonic(), 0, None
    try:
        while True:
            for rank in ranks:
                if rank not in statuses and (ended := os.waitpid(pids[rank], os.WNOHANG))[0]:
                    statuses[rank], heard = os.waitstatus_to_exitcode(ended[1]), time.monotonic()
            if all(rank in statuses or os.path.exists(f"{order['notes']}/{rank}.end") for rank in ranks):
                return {"how": "ended", "statuses": statuses}
            failed = failed or (any(statuses.values()) and time.monotonic())
            if failed and time.monotonic() > failed + GRACE:
                return {"how": "failed", "statuses": statuses}
            notes = sum(os.stat(file).st_size for file in os.scandir(order["notes"]))
            if notes != size:
                size, heard = notes, time.monotonic()
            if time.monotonic() > heard + (min(order["limit"], 2 * GRACE) if statuses else order["limit"]):
                return {"how": "silent", "statuses": statuses}
            if select.select([0], [], [], 0.02)[0]:
                raise EOFError
    finally:
        for rank in ranks:
            for number in (signal.SIGCONT, signal.SIGKILL):
                with contextlib.suppress(OSError):
                    os.killpg(pids[rank], number)
            if rank not in statuses:
                os.waitpid(pids[rank], 0)


def main():
    """Answer orders until the owner is gone, then remove the owner's folder."""
    torch.optim.SGD([torch.zeros(1)], 1.0)  # the first optimizer imports a second's worth of modules
    answers = os.dup(1)
    os.dup2(2, 1)  # what a rank's children print
    os.write(answers, (json.dumps({"torch": torch.__version__}) + "\n").encode())
    try:
        for line in iter(sys.stdin.readline, ""):
            answer = world(json.loads(line), answers)
            os.write(answers, (json.dumps(answer) + "\n").encode())
    except EOFError:
        pass
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(0)  # without the two seconds in which PyTorch takes itself down


if __name__ == "__main__":
    main()
