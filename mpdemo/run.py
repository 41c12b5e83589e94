"""What every rung needs besides PyTorch: its place in the world, batches, a log, checkpoints, a stop signal.

A rung is a script with a plain loop: ``for images, labels in run.batches(model, optimizer)``, then forward, backward,
step and ``run.log(loss, outputs, labels)``. Between two batches the run validates, saves, and stops where it was asked
to (between.py). Taught in notebooks/01_single_device.ipynb.
"""

import math
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

from mpdemo import data, models
from mpdemo.cuts import resolve_cut
from mpdemo.errors import UserError
from mpdemo.recorder import Recorder
from mpdemo.training.between import STOPPED, Between
from mpdemo.training.command import run_script
from mpdemo.training.meter import summarise
from mpdemo.training.stages import Part

PRECISION = {"fp32": None, "bf16": torch.bfloat16}


class Run(Between):
    """A training run: its checked settings `s`, this process's `rank` of `world`, the `devices` that it drives."""

    def __init__(self, settings, place):
        self.s, self.place = settings, place
        self.rank, self.world, self.device = place.rank, place.world_size, place.device
        self.devices = local_devices(place.device, settings.devices if settings.form == "one-process" else 1)
        self.recorder = Recorder(self.rank, self.device) if settings.timeline else None
        self.epoch = self.steps_done = self.status = 0  # where the training is; steps are counted from its start
        self.epoch_steps = []  # (loss, correct predictions, seconds) of every step of this epoch so far
        self.validation = None  # loss and accuracy of the last validation
        torch.manual_seed(settings.seed)

    @staticmethod
    def main(doc, train):
        """Run a rung's file as a program: read its options, join the world, train, end with an exit status."""
        run_script(doc, Path(train.__code__.co_filename).stem, partial(drive, train))

    def model(self):
        """Load the data set; return the whole model with its initial weights, the same in every process, on the CPU."""
        s, self.dataset = self.s, data.load(self.s.dataset, self.s.data, self.s.image_size, self.s.seed)
        shape = {"classes": self.dataset.classes, "channels": self.dataset.channels, "image_size": s.image_size}
        return self.prepared(models.build(s.model, **shape, norm=s.norm, seed=s.seed))

    def prepared(self, model):
        """Tell a model how to compute; its stages and copies will do the same."""
        model.precision = None if self.s.rung == "fsdp" else PRECISION[self.s.precision]  # FSDP's is its own: policy()
        model.checkpointing, model.channels_last = self.s.activation_checkpointing, self.s.channels_last
        return model.to(memory_format=torch.channels_last) if self.s.channels_last else model

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
        """Return the optimizer that the settings name, with PyTorch's own defaults."""
        if self.s.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.s.lr)
        return torch.optim.SGD(parameters, lr=self.s.lr, momentum=0.9)

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

    def split(self, images, labels) -> list:
        """Return the parts of a batch whose gradients are accumulated: pairs (images, labels)."""
        return list(zip(*(tensor.chunk(self.s.microbatches) for tensor in (images, labels)), strict=True))

    def log(self, loss, outputs, labels):
        """Add a batch's loss and correct predictions, or a part's, to the step's; does not wait for the device."""
        self.results.add(loss, outputs, labels)

    def batches(self, model, optimizer, replicas=1, replica=0, *, group=None, evaluate=None, images=True, output=True):
        """Yield (images, labels) of every step on this process's device.

        Between them it sets the learning rate, validates, saves, and stops after a signal. `model` is what this process
        holds: it is saved, restored, compiled where asked. The process is in number `replica` of `replicas` that share
        a batch; `group` has the same part of each (default: all). In a validation `evaluate` takes images and returns
        outputs (B, classes), or None where there are none (default: the model). Without `images` a process gets labels,
        and images of shape (B, 0). Without `output` its outputs do not count: another process has the same.
        """
        self.begin(model, optimizer, replicas, replica, group, images)
        self.evaluate, self.counts = evaluate or model, output
        begin = time.time()
        source = {"resume": self.s.resume} if self.s.resume else {}
        self.lines.write("start", step=self.steps_done, steps=self.last_step, time=round(begin, 4), **source)
        bar = {"total": self.last_step, "initial": self.steps_done, "desc": self.s.rung, "unit": "step"}
        with tqdm(**bar, disable=True if self.rank > 0 else None) as self.bar:
            # a run that is resumed from its last step has its last validation still to do
            while not self.status and (self.steps_done < self.last_step or self.validation is None):
                yield from self.one_epoch()
        if self.recorder:
            self.recorder.save(self.folder)
        if self.profiler:
            self.profiler.stop()
        summary = summarise(self, model, time.time() - begin, stopped=self.status == STOPPED)
        self.lines.finish(summary)
        if self.rank == 0:
            print(self.busy.sentence(summary["peak_memory_mib"]))


def train(settings, place) -> int:
    """Train one run of checked settings in this process's place of the world; return the exit status."""
    return drive(import_module(f"mpdemo.rungs.{settings.rung}").train, settings, place)


def drive(rung, settings, place) -> int:
    """Call a rung's ``train(run)`` with a new run; return the exit status."""
    run = Run(settings, place)
    rung(run)
    return run.status


def local_devices(device, count) -> list:
    """Return the devices that one process drives: `count` GPUs from its own on, or `count` times the CPU."""
    if device.type != "cuda":
        return [device] * count
    first, visible = device.index, torch.cuda.device_count()
    if first + count > visible:
        raise UserError(f"{count} devices wanted from GPU {first} on, {visible} GPUs visible; lower --devices")
    return [torch.device("cuda", first + i) for i in range(count)]
