"""Processes of the tests that find PyTorch imported already: worlds of several, and single ones."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile

from project import python_path

from mpdemo.paths import root
from mpdemo.world import supervisor, warm

EQUALITY, TRAIN = "tests/programs/equality.py", "tests/programs/training.py"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torchvision", "mpdemo.measure.trial", "mpdemo.rungs.hybrid", "mpdemo.rungs.tensor"]
)


def forked(folder, function, *arguments, timeout=800, **environment) -> subprocess.CompletedProcess:
    """Call a function in the project's root in a process of its own, whose exit status is what the function returns."""
    process = FORKS.Process(target=call, args=(folder, os.environ | environment, function, arguments))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed = ((folder / stream).read_text() for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, process.exitcode, *printed)


def call(folder, environment, function, arguments):
    """In the new process: print to files in `folder`."""
    for number, stream in ((1, "stdout"), (2, "stderr")):
        with (folder / stream).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(root())
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # PyTorch has asked for that of the tests
    sys.exit(function(*arguments))


def run_worlds(folder, worlds) -> str:
    """Run ``[processes, program, argument, ...]``, each a world, in 800 s for all of them; return what they print."""
    done = forked(folder, start_all, worlds, PYTHONPATH=python_path(root()), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def start(command, processes) -> int:
    """Run ``python COMMAND`` in processes of this machine that are forked with what is imported; return the status."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    job = {"name": "test", "command": command, "processes": processes, "torchrun": True, "grace": 5.0}
    job |= {"cwd": os.getcwd(), "environment": environment, "run_program": warm.run_program}
    return supervisor.supervise(job)["exit_status"]


def start_all(worlds) -> str | None:
    for processes, *command in worlds:
        if start(command, processes):
            return f"{command} failed in {processes} processes"
    return None


def written(path, content) -> str:
    """Write what a program of a world reads, as JSON; return the file."""
    path.write_text(json.dumps(content))
    return str(path)


def compared(folder, worlds, *options) -> dict:
    """Compare cases with the single device; worlds and results, one per case, by number of processes."""
    files = {n: folder / f"{n}.results" for n in worlds}
    programs = [
        [n, EQUALITY, written(folder / f"{n}.cases", cases), str(files[n])] for n, cases in worlds.items()
    ]
    run_worlds(folder, [[*program, *options] for program in programs])
    return {n: json.loads(file.read_text()) for n, file in files.items()}
