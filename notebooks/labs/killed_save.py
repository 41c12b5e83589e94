"""End a process in the middle of a save, and leave what is left: once with a plain save, once with an atomic one.

    python -m mpdemo.labs.killed_save FOLDER plain     # torch.save over the file last.pt
    python -m mpdemo.labs.killed_save FOLDER atomic    # torch.save under another name, then a rename

It saves a model and its optimizer twice. Before the second save it limits the size of its files to half of the
first one's, so that the operating system ends it there. Taught in notebooks/10_checkpoint.ipynb.
"""

import resource
import signal
import sys
from pathlib import Path

import torch

from mpdemo import models


def save(state, path, how):
    """Write a state over the last one, or under a temporary name first."""
    written = path if how == "plain" else path.with_suffix(".tmp")
    torch.save(state, written)
    if how == "atomic":
        written.replace(path)


def end_at(size):
    """Let the operating system end this process when it writes a file beyond `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no memory dump
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def main(folder, how):
    path = Path(folder, "last.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    model = models.build("transformer")
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(state | {"step": 24}, path, how)
    end_at(path.stat().st_size // 2)
    save(state | {"step": 25}, path, how)


if __name__ == "__main__":
    main(*sys.argv[1:])
