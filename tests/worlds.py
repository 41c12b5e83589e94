"""Worlds of real processes for the tests, one after the other, which share one import of PyTorch."""

import json
import os
import subprocess
import sys

from mpdemo.paths import root

EQUALITY, TRAIN = "tests/programs/equality.py", "tests/programs/training.py"


def run_worlds(folder, worlds):
    """Run ``[processes, program, argument, ...]``, each a world, in the project's root; 800 s for all of them."""
    (folder / "worlds.json").write_text(json.dumps(worlds))
    command = [sys.executable, "tests/programs/forked.py", str(folder / "worlds.json")]
    paths = [str(root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]


def written(path, content) -> str:
    """Write what a program of a world reads, as JSON; return the file."""
    path.write_text(json.dumps(content))
    return str(path)


def compared(folder, worlds, *options) -> dict:
    """Compare cases with the single device; worlds and results, one per case, by number of processes."""
    files = {n: folder / f"{n}.results" for n in worlds}
    programs = [[n, EQUALITY, written(folder / f"{n}.cases", cases), str(files[n])] for n, cases in worlds.items()]
    run_worlds(folder, [[*program, *options] for program in programs])
    return {n: json.loads(file.read_text()) for n, file in files.items()}
