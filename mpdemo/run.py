"""The loop of every training: `train`; and `Rung`, what a rung gives to it.

A rung is a file with one function, ``build(run)``. It returns what differs from the others: model, optimizer and
``step(images, labels)``. `train` calls that step for every batch; around it, it shuffles, logs, saves, validates, and
stops where it was asked to. Taught in notebooks/01_single_device.ipynb.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from mpdemo.training.meter import TrainingLog, score
from mpdemo.training.process import run_script
from mpdemo.training.progress import Checkpoints, Progress
from mpdemo.training.setup import Run, compile_blocks, learning_rate
from mpdemo.world.collectives import StopSignal, sum_over_ranks

STOPPED = 3  # exit status: stopped by a signal, a checkpoint is written


@dataclass
class Rung:
    """What a rung is made of in this process.

    Copies of the model (`replicas`) share a batch; this process is in number `replica`, and `group` has the same part
    of each (default: all processes).
    """

    model: nn.Module  # what this process holds of it: it is saved, restored, compiled
    optimizer: torch.optim.Optimizer
    step: Callable  # (images, labels) -> the `score` of this process, or None where another one has it
    evaluate: Callable | None = None  # images -> outputs (B, classes), or None as well; default: the model
    replicas: int = 1
    replica: int = 0
    group: Any = None
    images: bool = True  # else this process gets labels, and images of shape (B, 0)

    def __post_init__(self):
        self.evaluate = self.evaluate or self.model

    def agree_on_buffers(self):
        """Give every replica the first one's buffers (batch norm's), before they are used or saved."""
        for buffer in self.model.buffers() if self.replicas > 1 else ():
            dist.broadcast(buffer, group=self.group, group_src=0)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # training steps all have one shape; these have others
def validation_sums(rung, batches, device, stop=None):
    """Return sums over this process's validation images: losses, correct predictions, images; None after a signal."""
    rung.agree_on_buffers()
    rung.model.eval()
    sums = torch.zeros(3, dtype=torch.double, device=device)
    for images, labels in batches:
        outputs = rung.evaluate(images)
        if outputs is not None:
            labels = labels.to(outputs.device)
            loss, count = cross_entropy(outputs, labels) * len(labels), torch.ones_like(labels).sum()
            sums += torch.cat([score(loss, outputs, labels), count[None]]).to(device)
        if stop and stop.seen():
            return None
    return sums


def validate(rung, batches, device, stop):
    """Return mean loss and accuracy over every validation image, once, over all ranks; None after a signal."""
    sums = validation_sums(rung, batches, device, stop)
    if sums is None:
        return None
    loss, correct, count = sum_over_ranks(sums).tolist()
    return loss / count, correct / count


def train(settings, place, build=None, validate=validate) -> int:
    """Train one run of checked settings in this process's place of the world; return the exit status."""
    run = Run(settings, place)  # gives the device, model, data and optimizer of the settings: training/setup.py
    rung = (build or builder(settings.rung))(run)
    loaders = run.loaders(rung)  # DistributedSampler(num_replicas=rung.replicas, rank=rung.replica)
    progress = Progress(settings, loaders.steps_per_epoch)
    rates = learning_rate(rung.optimizer, settings, progress.length)
    checkpoints = Checkpoints(settings, rung, progress, rates)
    resumed = checkpoints.resume()
    if settings.compile:
        compile_blocks(rung.model)  # each block in place, so that what wraps the model stays
    stop = StopSignal(run.device, settings.log_every)
    log = TrainingLog(run, rung, progress, stop, resumed)
    with log, run.observers():  # profiler and timeline, where the settings ask for them
        while progress.unfinished:
            loaders.start_epoch(progress.epoch, progress.done)  # sampler.set_epoch: each epoch has an order of its own
            rung.model.train()
            for images, labels in islice(loaders.train, progress.left):
                with run.observed():
                    result = rung.step(images, labels)
                progress.step += 1
                log.step(result)  # stays on the device until log.flush(), which waits for it
                rates.step()  # the learning rate of the next step
                if stop.seen() or checkpoints.due():  # all ranks decide alike
                    log.flush()
                    checkpoints.save(must=stop.now)
                    log.restart_clock()
                if stop.now:
                    return STOPPED
            log.flush()
            validation = validate(rung, loaders.validation, run.device, stop)
            if stop.now:  # it may take longer than is left
                checkpoints.save(must=True)
                return STOPPED
            log.epoch(validation)
            progress.end_epoch(validation)
    return 0


def builder(rung) -> Callable:
    """Return the function ``build(run)`` of a rung."""
    return import_module(f"mpdemo.rungs.{rung}").build


def main(doc, build):
    """Run a rung's file as a program: read its options, init_process_group (world/env.py), train, exit by a status."""
    run_script(doc, Path(build.__code__.co_filename).stem, partial(train, build=build))
