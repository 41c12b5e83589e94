"""What a test lets befall a script to take home, from within. The script imports it from its own folder."""

import faulthandler
import io
import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path

import torch
from torch.utils.data import Dataset


def befall(what, now, rank):
    """Let something befall a rank, if it is time."""
    if now and os.environ.get("RANK", "0") == str(rank):
        globals()[what]()


def die(*_):
    """End this process as a node's power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    """Let this process and its loader's workers get what a batch system sends; its stack was shown before."""
    faulthandler.dump_traceback()
    for pid in (os.getpid(), *(worker.pid for worker in active_children())):
        os.kill(pid, signal.SIGTERM)


def die_in_the_middle_of_a_file():
    """End this process when half of what it saves next is on the disk."""
    save = torch.save

    def save_half(what, file):
        save(what, whole := io.BytesIO())
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        die()

    torch.save = save_half


def die_before_the_name():
    """End this process when all that it saves next is on the disk, but not under its name."""
    Path.replace = Path.rename = die


def hurry(rank):
    """Let the clock of a rank run a million times too fast."""
    if os.environ["RANK"] == str(rank):
        right = time.monotonic
        time.monotonic = lambda: 1e6 * right()


class Noisy(Dataset):
    """Some values of each sample are 0, others whenever it is read."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        values, target = self.dataset[number]
        return values * (torch.rand(values.shape) > 0.1), target
