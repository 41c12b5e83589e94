"""The loop of every training, and what a rung needs besides PyTorch to be built: `train`, `Run`, `Rung`.

A rung is a file with one function, ``build(run)``. It returns what differs from the others: model, optimizer and
``step(images, labels)``. `train` calls that step for every batch; around it, it shuffles, logs, saves, validates, and
stops where it was asked to. Taught in notebooks/01_single_device.ipynb.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import cross_entropy

from mpdemo import data, models
from mpdemo.cuts import resolve_cut
from mpdemo.errors import UserError
from mpdemo.recorder import Recorder
from mpdemo.training.busy import profiler
from mpdemo.training.command import run_script
from mpdemo.training.meter import TrainingLog, score
from mpdemo.training.progress import Checkpoints, Progress
from mpdemo.training.stages import Part
from mpdemo.world.collectives import StopSignal, sum_over_ranks

STOPPED = 3  # exit status: stopped by a signal, a checkpoint is written
PRECISION = {"fp32": None, "bf16": torch.bfloat16}


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
def validate(rung, batches, device, stop):
    """Return mean loss and accuracy over every validation image, once, over all ranks; None after a signal."""
    rung.agree_on_buffers()
    rung.model.eval()
    sums = torch.zeros(3, dtype=torch.double, device=device)
    for images, labels in batches:
        outputs = rung.evaluate(images)
        if outputs is not None:
            labels = labels.to(outputs.device)
            loss, count = cross_entropy(outputs, labels) * len(labels), torch.ones_like(labels).sum()
            sums += torch.cat([score(loss, outputs, labels), count[None]]).to(device)
        if stop.seen():
            return None
    loss, correct, count = sum_over_ranks(sums).tolist()
    return loss / count, correct / count


def train(settings, place, build=None, validate=validate) -> int:
    """Train one run of checked settings in this process's place of the world; return the exit status."""
    run = Run(settings, place)
    rung = (build or builder(settings.rung))(run)
    loaders = run.loaders(rung)
    progress = Progress(settings, loaders.steps_per_epoch)
    rates = run.learning_rate(rung.optimizer, settings, progress.length)
    checkpoints = Checkpoints(settings, rung, progress, rates)
    resumed = checkpoints.resume()
    if settings.compile:
        compile_blocks(rung.model)
    stop = StopSignal(run.device, settings.log_every)
    log = TrainingLog(run, rung, progress, stop, resumed)
    with log, run.observers():
        while progress.unfinished:
            loaders.start_epoch(progress.epoch, progress.done)  # sampler.set_epoch: each epoch has an order of its own
            rung.model.train()
            for images, labels in islice(loaders.train, progress.left):
                with run.observed():
                    result = rung.step(images, labels)
                log.step(result)
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
    return 0


class Run:
    """What a rung is built from: checked settings `s`, this process's `rank` of `world`, the `devices` it drives."""

    def __init__(self, settings, place, make_model=None, make_optimizer=None, devices=None):
        """Model, optimizer and devices are those of the settings, unless a trial or a dry run brings its own."""
        self.s, self.place = settings, place
        self.make_model, self.make_optimizer = make_model or self.model_of_settings, make_optimizer or self.chosen
        self.rank, self.world, self.device = place.rank, place.world_size, place.device
        driven = settings.devices if settings.form == "one-process" else 1
        self.devices = devices or local_devices(place.device, driven)
        self.recorder = Recorder(self.rank, self.device) if settings.timeline else None
        self.profiler, self.folder = None, Path(settings.out)
        torch.manual_seed(settings.seed)

    @staticmethod
    def main(doc, build):
        """Run a rung's file as a program: read its options, join the world, train, end with an exit status."""
        run_script(doc, Path(build.__code__.co_filename).stem, partial(train, build=build))

    @cached_property
    def dataset(self):
        """The data set of the settings."""
        return data.load(self.s.dataset, self.s.data, self.s.image_size, self.s.seed)

    def model(self):
        """Return the whole model with its initial weights, the same in every process, on the CPU."""
        return self.prepared(self.make_model())

    def model_of_settings(self):
        """Return the model of the settings, for their data set."""
        shape = {"classes": self.dataset.classes, "channels": self.dataset.channels, "image_size": self.s.image_size}
        return models.build(self.s.model, **shape, norm=self.s.norm, seed=self.s.seed)

    def prepared(self, model):
        """Tell a model how to compute; its stages and copies will do the same."""
        model.precision = None if self.s.rung == "fsdp" else PRECISION[self.s.precision]  # FSDP's is its own: policy()
        model.checkpointing = self.s.activation_checkpointing
        return model

    def policy(self):
        """Return FSDP's precision: that of the settings in the rung fsdp; in others the model itself has it."""
        kind = PRECISION[self.s.precision] if self.s.rung == "fsdp" else None
        return MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if kind else None)

    def cut(self, model) -> list:
        """Return the stages of a model for the devices of this process, all of which it drives."""
        return model.cut(resolve_cut(model.names, self.s.cut, len(self.devices)))

    def part(self, group=None) -> Part:
        """Return this process's part of a model that is cut over the processes of a group (default: all)."""
        schedule = "GPipe" if self.s.rung == "model_parallel" else self.s.schedule
        part = Part(self.model(), self.s, self.rank, self.device, group, schedule)
        if self.recorder:
            self.recorder.watch(part)
        return part

    def optimizer(self, parameters):
        """Return the optimizer of these parameters."""
        return self.make_optimizer(parameters)

    def chosen(self, parameters):
        """Return the optimizer that the settings name, with PyTorch's own defaults."""
        if self.s.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.s.lr)
        return torch.optim.SGD(parameters, lr=self.s.lr, momentum=0.9)

    def split(self, images, labels) -> list:
        """Return the parts of a batch whose gradients are accumulated: pairs (images, labels)."""
        return list(zip(*(tensor.chunk(self.s.microbatches) for tensor in (images, labels)), strict=True))

    def loaders(self, rung) -> data.Loaders:
        """Return the loaders of a rung's batches."""
        share = {"replicas": rung.replicas, "replica": rung.replica, "images": rung.images, "device": self.device}
        return data.Loaders(self.dataset, self.s.batch_size, seed=self.s.seed, workers=self.s.workers, **share)

    @staticmethod
    def learning_rate(optimizer, settings, length):
        """Return the scheduler of the learning rate: a warm-up, then constant or along a half cosine.

        The rate depends on the step's number only, so a resumed run has that of the uninterrupted one. The cosine ends
        after `length` steps, also where the training is stopped earlier.
        """
        warmup, cosine = settings.warmup_steps, settings.lr_schedule == "cosine"
        if cosine and warmup >= length:
            what = f"--warmup-steps {warmup} leaves no step of {length} to the cosine"
            raise UserError(f"{what}; allowed: 0 to {length - 1}")

        def factor(step):  # counted from 0
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (length - warmup))) if cosine else 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    @contextmanager
    def observed(self):
        """Record a ``with`` block as one step, where the settings ask for a timeline or a profile."""
        with self.recorder.step() if self.recorder else nullcontext():
            yield
        if self.profiler:
            self.profiler.step()

    @contextmanager
    def observers(self):
        """Start the profiler where the settings ask for it; at the end, write what was recorded."""
        self.profiler = profiler(self) if self.s.profile else None
        yield
        if self.recorder:
            self.recorder.save(self.folder)
        if self.profiler:
            self.profiler.stop()


def builder(rung) -> Callable:
    """Return the function ``build(run)`` of a rung."""
    return import_module(f"mpdemo.rungs.{rung}").build


def compile_blocks(model):
    """Let the first step compile every block, since wrappers are then in place; equal blocks share their code."""
    torch._inductor.config.compile_threads = 1  # a rank has one core
    torch._dynamo.config.recompile_limit = 64  # the blocks of a ResNet differ
    for block in model.blocks():
        block.compile()


def local_devices(device, count) -> list:
    """Return the devices that one process drives: `count` GPUs from its own on, or `count` times the CPU."""
    if device.type != "cuda":
        return [device] * count
    first, visible = device.index, torch.cuda.device_count()
    if first + count > visible:
        raise UserError(f"{count} devices wanted from GPU {first} on, {visible} GPUs visible; lower --devices")
    return [torch.device("cuda", first + i) for i in range(count)]
