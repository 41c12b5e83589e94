"""End a process in the middle of a save, and see what is left: once with a plain save, once with an atomic one.

    python -m mpdemo.labs.killed_save RUN FOLDER plain     # torch.save over the file last.pt
    python -m mpdemo.labs.killed_save RUN FOLDER atomic    # mpdemo.training.checkpoint.save

It saves the newest checkpoint of a run twice. Before the second save it limits the size of its files to a quarter of
the first one's, so that the operating system ends it there. Taught in notebooks/09_checkpoint.ipynb.
"""

import resource
import signal
import sys
from pathlib import Path

import torch

from mpdemo import models
from mpdemo.training import checkpoint


def end_at(size):
    """Let the operating system end this process when it writes a file beyond `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no memory dump
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def save(model, optimizer, state, folder, how):
    """Save a checkpoint over the last one, or under a temporary name first."""
    if how == "atomic":
        checkpoint.save(folder, model, optimizer, state)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | weights, folder / "last.pt")


def main(run, folder, how):
    state = checkpoint.read_newest(run)
    model = models.build(state["settings"]["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.restore(state, model, optimizer)
    of_this_save = ("small", "random", "checksums", "path")
    state, folder = {name: value for name, value in state.items() if name not in of_this_save}, Path(folder)
    save(model, optimizer, state, folder, how)
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    end_at(written // 4)
    save(model, optimizer, state | {"step": state["step"] + 1}, folder, how)


if __name__ == "__main__":
    main(*sys.argv[1:])
