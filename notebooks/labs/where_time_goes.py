"""Where the time of a DDP step goes, in every rank: as it is, with a slowed rank, and with a slow loader.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.where_time_goes runs/09_time

All ranks do a few steps of each case under PyTorch's profiler; rank 0 writes ``summary.json`` in the folder: of each
case and rank the seconds of every part of the mean step (`parts`), and for how long it waited in each. It computes on
CPU cores, since a GPU's parts would only be launched until the end of a step. Taught in notebooks/09_scaling.ipynb.
"""

import os
import sys
import time
from dataclasses import replace
from functools import partial
from statistics import mean

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from mpdemo import data, models
from mpdemo.measure.compare import write_result
from mpdemo.measure.timeline import waiting
from mpdemo.measure.trial import record_steps
from mpdemo.world.devices import ON_THE_CPU
from mpdemo.world.launch import end

WARMUP, STEPS = 2, 9
BATCH = 32  # of all ranks: this is about shares of a step, which may be a short one
SLOWED, AGAIN = 1, 2  # this rank computes each block of its forward pass so many times more
SECONDS_PER_IMAGE = 0.01  # of the slow loader, in which no core works
KINDS = {"loading": "L", "forward": "F", "backward": "B", "optimizer": "O", "exposed": "exposed", "waits": "waits"}
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


def measure(world, case) -> list[dict]:
    """Record some steps of one case; return the seconds of their parts in each rank, on average. All must call this."""
    digits, model = data.load("digits"), models.build("transformer").to(world.device)
    if case == "slowed rank" and world.rank == SLOWED % world.world_size:
        for name in model.names:
            model.get_submodule(name).register_forward_hook(compute_again)
    if case == "slow loader":
        digits = replace(digits, train=RemoteImages(digits.train, SECONDS_PER_IMAGE))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters())
    loaders = data.Loaders(digits, BATCH, world.world_size, world.rank)  # the rank reads: a process would hide its time
    step = partial(one_step, ddp, optimizer, iter(loaders.train), world.device)
    for _ in range(WARMUP):
        step()
    steps = record_steps(step, steps=STEPS + 2)  # without the first and the last
    rows = []
    for rank in range(world.world_size):
        found = [parts(step, rank) for step in steps]
        rows.append({"case": case, "rank": rank, "waits_steps": [seconds["waits"] for seconds in found]})
        rows[-1] |= {part: mean(seconds[part] for seconds in found) for part in found[0]}
    return rows


def one_step(ddp, optimizer, loader, device):
    """Do one step of the training loop; its `next` is what the profiler knows as loading."""
    images, labels = (tensor.to(device) for tensor in next(loader))
    optimizer.zero_grad()
    cross_entropy(ddp(images), labels).backward()
    optimizer.step()


def parts(step, rank) -> dict:
    """Divide a step of `mpdemo.measure.traces` among what one rank did, in seconds.

    `loading`, `forward`, `backward`, `optimizer`, `exposed` (bytes moved and it computed nothing), `waits` (for a rank)
    and `other` (Python between operations) are the whole step; `hidden` is the communication while it computed.
    """
    own = [row for row in step["events"] if row["rank"] == rank]
    rows = own + [row for row in waiting(step["events"]) if row["rank"] == rank]
    found = {
        part: sum(row["end"] - row["start"] for row in rows if row["kind"] == kind) for part, kind in KINDS.items()
    }
    found["other"] = step["end"] - sum(found.values())
    moving, until = 0.0, 0.0
    for row in sorted((row for row in own if "moves" in row), key=lambda row: row["moves"]):
        moving += max(0.0, row["end"] - max(until, row["moves"]))  # of two at the same time, one counts
        until = max(until, row["end"])
    return found | {"hidden": moving - found["exposed"]}


@torch.no_grad()
def compute_again(block, inputs, outputs):
    """After a block's forward pass, do it again and forget the result: this rank's device is a slow one."""
    for _ in range(AGAIN):
        block.forward(*inputs)


def main(out):
    """Measure all cases in every process, on CPU cores; rank 0 writes the result."""
    os.environ |= ON_THE_CPU
    write_result(out, lambda world: {"rows": [row for case in CASES for row in measure(world, case)]})


if __name__ == "__main__":
    end(main(sys.argv[1]))
