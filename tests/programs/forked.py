"""Run programs of this folder, each in several processes that share one import of PyTorch.

forked.py FILE: a JSON list of [processes, program, argument, ...], which are run one after the other. Importing PyTorch
takes a process seconds of a core; nothing is computed before the forks, which could hang otherwise.
"""

import json
import os
import runpy
import signal
import sys

import torchvision  # noqa: F401

import mpdemo.rungs.hybrid
import mpdemo.rungs.tensor
import mpdemo.trial  # noqa: F401
from mpdemo.world.supervisor import free_port

SECONDS = 400  # of one world, on a busy machine


def fork(processes, program, arguments) -> list[int]:
    """Start the ranks of a world on this machine; return their process numbers."""
    port, children = str(free_port()), []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ |= {name: str(value) for name, value in place.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            sys.argv = [program, *arguments]
            runpy.run_path(program, run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    return children


def wait(children) -> int:
    """Wait until all have ended; end the others when one fails. Return the exit status."""
    failed = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not failed:
            failed = 1
            for other in children:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        worlds = json.load(file)
    for processes, program, *arguments in worlds:
        if wait(fork(processes, program, arguments)):
            sys.exit(f"{program} failed in {processes} processes")
