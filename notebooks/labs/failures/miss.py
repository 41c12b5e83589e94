"""Three steps in which rank 0 makes one call more than rank 1, so that both wait in vain, each at a line that is right.

    torchrun --standalone --nproc-per-node=2 -m mpdemo.labs.failures.miss FOLDER

After 4 s each rank writes its stack into the folder, and after its timeout its flight recorder into FOLDER/recorder.
Taught in notebooks/61_hang.ipynb.
"""

import faulthandler
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mpdemo.labs.failures.recorder import write_recorder


def average(gradient):
    dist.all_reduce(gradient)


def log(loss):
    dist.all_reduce(loss)


def train(rank):
    for step in range(3):
        average(torch.tensor([step + 1.0]) * 10**rank)
        if rank == 0 and step == 0:
            log(torch.tensor([0.5]))
    dist.barrier()


def main(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    rank = dist.get_rank()
    with open(Path(folder, f"stack_{rank}"), "w") as file:
        faulthandler.dump_traceback_later(4, file=file)
        try:
            train(rank)
        finally:
            faulthandler.cancel_dump_traceback_later()
            write_recorder(Path(folder, "recorder"))


if __name__ == "__main__":
    main(*sys.argv[1:])
