"""DDP over a model on two devices: each process splits the model over its two devices, and DDP averages over processes.

    srun --nodes 2 --ntasks-per-node 1 python -m mpdemo.labs.ddp_two_devices runs/06_two_devices

Without GPUs both devices stand for the CPU. Rank 0 writes ``metrics.jsonl`` and ``summary.json``.
Taught in notebooks/06_hybrid.ipynb. Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html.
"""

import socket
import sys
from itertools import islice

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mpdemo import data, models
from mpdemo.measure.trial import join_world
from mpdemo.training.log import RunLog
from mpdemo.training.setup import local_devices
from mpdemo.world.collectives import gather_objects
from mpdemo.world.launch import end

BATCH, STEPS = 64, 12  # images over all processes together


class OnTwoDevices(nn.Module):
    """The course model: four of its eight blocks on the first device, the rest on the second."""

    def __init__(self, first, second):
        super().__init__()
        model = models.build("transformer")
        half = model.names.index("block.3") + 1
        self.devices = first, second
        self.first = model.stage(0, half).to(first)
        self.second = model.stage(half, len(model)).to(second)

    def forward(self, images):
        x = self.first(images.to(self.devices[0]))
        return self.second(x.to(self.devices[1]))  # the outputs are on the second device


def train(world, steps) -> list[float]:
    """Train; return the loss of every step, over all processes."""
    devices = local_devices(world.device, 2)
    ddp, losses = DistributedDataParallel(OnTwoDevices(*devices)), []  # the module places its own inputs
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    loaders = data.Loaders(data.load("digits"), BATCH, world.world_size, world.rank)
    for images, labels in islice(loaders.train, steps):
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images), labels.to(devices[1]))
        loss.backward()  # averages over the processes, the gradients of both devices
        optimizer.step()
        losses.append(sum(gather_objects(loss.item())) / world.world_size)
    return losses


def main(out, steps=STEPS):
    """Train in every process; rank 0 writes the result."""
    with join_world(devices=2) as world:
        losses, hosts = train(world, int(steps)), gather_objects(socket.gethostname())
    log = RunLog(out, world.rank == 0)
    for step, loss in enumerate(losses, 1):
        log.write("step", step=step, loss=loss)
    log.finish({"hosts": hosts, "loss": losses[-1]})


if __name__ == "__main__":
    end(main(*sys.argv[1:]))
