"""Where the time of a DDP step goes, in every rank: as it is, with a slowed rank, and with a slow loader.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.where_time_goes runs/08_time

All ranks do a few steps of each case under PyTorch's profiler; rank 0 writes ``summary.json`` in the folder: for each
case and rank the median seconds of every part of a step (profile_parts.py). Taught in notebooks/08_scaling.ipynb.
"""

import sys
from dataclasses import replace
from statistics import median

import torch
from torch.profiler import record_function

from mpdemo import data
from mpdemo.labs.harness import rest, write_result
from mpdemo.labs.ladder import model_and_batch
from mpdemo.labs.loading import RemoteImages
from mpdemo.labs.profile_parts import LOADING, STEP, recording, steps_of
from mpdemo.trial import Trial
from mpdemo.notebook.story import story
from mpdemo.settings import Settings
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

WARMUP, STEPS = 2, 4
BATCH = 32  # of all ranks: this is about shares of a step, which may be a short one
SLOWED, AGAIN = 1, 2  # this rank computes each block of its forward pass so many times more
SECONDS_PER_IMAGE = 0.01  # of the slow loader, in which no core works
CASES = ("as it is", "slowed rank", "slow loader")


def measure(world, case) -> dict:
    """Record some steps of one case; all ranks must call this.

    Returns
    -------
    dict
        Of this rank: `case`, `rank` and the median seconds of a step's parts.
    """
    settings, digits = Settings(**story("ddp", batch_size=BATCH)), data.load("digits")
    trial = Trial(settings, world, *model_and_batch(settings))
    if case == "slowed rank" and world.rank == SLOWED % world.world_size:
        for name in trial.rung.model.names:
            trial.rung.model.get_submodule(name).register_forward_hook(compute_again)
    if case == "slow loader":
        digits = replace(digits, train=RemoteImages(digits.train, SECONDS_PER_IMAGE))
    loader = batches(digits, trial)
    for _ in range(WARMUP):
        one_step(trial, loader)
    rest()
    with recording() as recorded:
        for _ in range(STEPS):
            one_step(trial, loader)
    rows = steps_of(recorded)
    return {"case": case, "rank": world.rank} | {part: median(row[part] for row in rows) for part in rows[0]}


def batches(dataset, trial):
    """Return an iterator over the batches of a rank, read by the rank itself: a loader process would hide its time."""
    loaders = data.Loaders(dataset, trial.settings.batch_size, trial.rung.replicas, trial.rung.replica)
    loaders.start_epoch(0)
    return iter(loaders.train)


def one_step(trial, loader):
    """Do one step of the training loop, its ranges marked for the profiler."""
    with record_function(STEP):
        with record_function(LOADING):
            batch = next(loader)
        trial.step(batch)
        for device in trial.devices:
            clock.wait(device)


@torch.no_grad()
def compute_again(block, inputs, outputs):
    """After a block's forward pass, do it again and forget the result: this rank's device is a slow one."""
    for _ in range(AGAIN):
        block.forward(*inputs)


def main(out):
    """Measure all cases in every process; rank 0 writes the result."""
    write_result(out, lambda world: {"rows": [row for case in CASES for row in gather_objects(measure(world, case))]})


if __name__ == "__main__":
    end(main(sys.argv[1]))
