"""Where the time of a DDP step goes, in every rank: as it is, with a slowed rank, and with a slow loader.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.where_time_goes runs/09_time

All ranks do a few steps of each case under PyTorch's profiler; rank 0 writes ``summary.json`` in the folder: of each
case and rank the seconds of every part of the mean step (profile_parts.py), and the exposed ones of each. It computes
on CPU cores, since a GPU's parts would only be launched until the end of a step. Taught in notebooks/09_scaling.ipynb.
"""

import os
import sys
import time
from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import Dataset

from mpdemo import data, models
from mpdemo.labs.profile_parts import LOADING, STEP, mean_step, recording, steps_of
from mpdemo.measure.compare import write_result
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects, rest
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.launch import end

WARMUP, STEPS = 2, 9
BATCH = 32  # of all ranks: this is about shares of a step, which may be a short one
SLOWED, AGAIN = 1, 2  # this rank computes each block of its forward pass so many times more
SECONDS_PER_IMAGE = 0.01  # of the slow loader, in which no core works
CASES = ("as it is", "slowed rank", "slow loader")


class RemoteImages(Dataset):
    """Images that come one by one from a slow file system: each takes `seconds`, in which no core works."""

    def __init__(self, dataset, seconds):
        self.dataset, self.seconds = dataset, seconds

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.dataset[index]


def measure(world, case) -> dict:
    """Record some steps of one case; return the seconds of their parts, on average. All ranks must call this."""
    digits, model = data.load("digits"), models.build("transformer").to(world.device)
    if case == "slowed rank" and world.rank == SLOWED % world.world_size:
        for name in model.names:
            model.get_submodule(name).register_forward_hook(compute_again)
    if case == "slow loader":
        digits = replace(digits, train=RemoteImages(digits.train, SECONDS_PER_IMAGE))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters())
    loaders = data.Loaders(digits, BATCH, world.world_size, world.rank)  # the rank reads: a process would hide its time
    loader = iter(loaders.train)
    for _ in range(WARMUP):
        one_step(ddp, optimizer, loader, world.device)
    rest()
    with recording() as recorded:
        for _ in range(STEPS):
            one_step(ddp, optimizer, loader, world.device)
    steps = steps_of(recorded)
    return {"case": case, "rank": world.rank, "exposed_steps": [step["exposed"] for step in steps]} | mean_step(steps)


def one_step(ddp, optimizer, loader, device):
    """Do one step of the training loop, its ranges marked for the profiler."""
    with record_function(STEP):
        with record_function(LOADING):
            images, labels = (tensor.to(device) for tensor in next(loader))
        optimizer.zero_grad()
        cross_entropy(ddp(images), labels).backward()
        optimizer.step()
        clock.wait(device)


@torch.no_grad()
def compute_again(block, inputs, outputs):
    """After a block's forward pass, do it again and forget the result: this rank's device is a slow one."""
    for _ in range(AGAIN):
        block.forward(*inputs)


def main(out):
    """Measure all cases in every process, on CPU cores; rank 0 writes the result."""
    os.environ |= ON_THE_CPU
    write_result(out, lambda world: {"rows": [row for case in CASES for row in gather_objects(measure(world, case))]})


if __name__ == "__main__":
    end(main(sys.argv[1]))
