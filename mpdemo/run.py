"""The loop of every training: `train`; and `Rung`, what a rung gives to it.

A rung is a file with one function, ``build(run)``. It returns what differs from the others: model, optimizer and
``step(images, labels)``. `train` calls that step for every batch; around it, it shuffles, logs and validates. torchrun
starts the file itself: ``torchrun --standalone --nproc-per-node 2 -m mpdemo.rungs.ddp``. Taught in
notebooks/12_one_step.ipynb.
"""

import argparse
import faulthandler
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from mpdemo.errors import UserError, one_line
from mpdemo.options import LineParser, add_options, options_from
from mpdemo.settings import Settings, checked, is_per_device
from mpdemo.training.meter import TrainingLog, score
from mpdemo.training.setup import Run, learning_rate
from mpdemo.world.collectives import sum_over_ranks
from mpdemo.world.env import join_world, read_launcher
from mpdemo.world.processes import end, lost_a_peer
from mpdemo.world.say import own_rank

# s for which the others wait while rank 0 reports: torchrun ends all ranks as soon as one has failed
MANNERS = 10.0
AFTER_THE_LOST = 1.0  # s that who lost a rank waits: its sockets close before its own end can be seen
PATIENCE = 1800.0  # s for which ranks wait for one that lists a large folder of images


@dataclass
class Rung:
    """What a rung is made of in this process.

    Copies of the model (`replicas`) share a batch; this process is in number `replica`, and `group` has the same part
    of each (default: all processes).
    """

    model: nn.Module  # what this process holds of it
    optimizer: torch.optim.Optimizer
    step: Callable  # (images, labels) -> the `score` of this process, or None where another one has it
    evaluate: Callable | None = None  # images -> outputs (B, classes), or None as well; default: the model
    replicas: int = 1
    replica: int = 0
    group: Any = None
    images: bool = True  # else this process gets labels, and images of shape (B, 0)

    def __post_init__(self):
        self.evaluate = self.evaluate or self.model


@torch.no_grad()
def validate(rung, batches, device):
    """Return mean loss and accuracy over every validation image, once, over all ranks."""
    for buffer in rung.model.buffers() if rung.replicas > 1 else ():
        dist.broadcast(buffer, group=rung.group, group_src=0)  # batch norm's averages differ
    rung.model.eval()
    sums = torch.zeros(3, dtype=torch.double, device=device)
    for images, labels in batches:
        outputs = rung.evaluate(images)
        if outputs is not None:
            labels = labels.to(outputs.device)
            loss, count = cross_entropy(outputs, labels) * len(labels), torch.ones_like(labels).sum()
            sums += torch.cat([score(loss, outputs, labels), count[None]]).to(device)
    loss, correct, count = sum_over_ranks(sums).tolist()
    return loss / count, correct / count


def train(settings, place, build=None, validate=validate):
    """Train one run of checked settings in this process's place of the world."""
    # gives the device, model, data and optimizer of the settings: training/setup.py
    run = Run(settings, place)
    rung = (build or builder(settings.rung))(run)
    loaders = run.loaders(rung)  # DistributedSampler(num_replicas=rung.replicas, rank=rung.replica)
    length = loaders.steps_per_epoch
    whole = settings.epochs * length if settings.epochs else settings.steps
    last = min(settings.steps or whole, whole)  # --steps 20 --epochs 4 is the beginning of --epochs 4
    rates = learning_rate(rung.optimizer, settings, whole)
    with TrainingLog(run, rung, last) as log, run.recording():
        for epoch in range(math.ceil(last / length)):
            loaders.start_epoch(epoch)  # sampler.set_epoch: each epoch has an order of its own
            rung.model.train()
            for images, labels in islice(loaders.train, last - epoch * length):
                with run.observed():
                    result = rung.step(images, labels)
                log.step(epoch, result)  # stays on the device until log.flush(), which waits for it
                rates.step()  # the learning rate of the next step
            log.flush(epoch)
            log.epoch(epoch, validate(rung, loaders.validation, run.device))


def builder(rung) -> Callable:
    """Return the function ``build(run)`` of a rung."""
    return import_module(f"mpdemo.rungs.{rung}").build


def main(doc, build):
    """Run a rung's file as a program: read its options, init_process_group (world/env.py), train, exit by a status."""
    faulthandler.register(signal.SIGUSR2, all_threads=False)  # a rank that hangs then says where it is
    rung, status = Path(build.__code__.co_filename).stem, 0
    layout = argparse.RawDescriptionHelpFormatter
    parser = LineParser(prog=f"python -m mpdemo.rungs.{rung}", description=doc, formatter_class=layout)
    add_options(parser, Settings, without=("rung",))
    try:
        settings, launcher = (
            options_from(parser.parse_args(), Settings, rung=rung),
            read_launcher(os.environ),
        )
        settings = checked(settings, None if launcher["launcher"] == "none" else launcher["world_size"])
        with join_world(1 if is_per_device(settings) else settings.devices, PATIENCE) as place:
            train(settings, place, build)
    except Exception as error:
        status = report(error, own_rank() or "0")
    except KeyboardInterrupt:
        # Ctrl-C is no error of this rank, and nor is the peer that it may have lost by then.
        status = 128 + signal.SIGINT
    end(status)  # tearing down a broken process group may hang, and the others are waiting for this end


def report(error, rank) -> int:
    """Say on stderr why this process ends; return its exit status. A mistake of all processes is said by rank 0."""
    if isinstance(error, UserError):
        time.sleep(MANNERS if rank != "0" else 0)  # it is ended in this time, unless the mistake is its own
        print(f"mpdemo: error: {one_line(str(error))}", file=sys.stderr)
        return error.status
    if lost_a_peer(error):
        time.sleep(AFTER_THE_LOST)  # the first rank to end is the one that is named
        print(f"mpdemo: rank {rank} lost another rank and ends", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 1
