"""End a process in the middle of a save, and see what is left: once with a plain save, once with an atomic one.

    python -m mpdemo.labs.killed_save RUN FOLDER plain     # torch.save over the file last.pt
    python -m mpdemo.labs.killed_save RUN FOLDER atomic    # mpdemo.training.checkpoint.write

It takes the newest checkpoint of a run and saves it twice. Before the second save it limits the size of its files to
half of that, so that the operating system ends it there. Taught in notebooks/09_checkpoint.ipynb.
"""

import resource
import signal
import sys
from pathlib import Path

import torch

from mpdemo.training import checkpoint


def end_at(size):
    """Let the operating system end this process when it writes a file beyond `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no memory dump
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def save(state, folder, how) -> Path:
    """Save a checkpoint over the last one, or under a temporary name first."""
    if how == "atomic":
        return checkpoint.write(folder, state)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "last.pt"
    torch.save(state, path)
    return path


def main(run, folder, how):
    state = checkpoint.read(checkpoint.newest(run))
    path = save(state, Path(folder), how)
    end_at(path.stat().st_size // 2)
    save(state | {"step": state["step"] + 1}, Path(folder), how)


if __name__ == "__main__":
    main(*sys.argv[1:])
