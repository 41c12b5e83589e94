"""A rung driven from outside, one step at a time: for its gradients, or to be timed alternately with others.

`observe` records a rung that holds the whole model: its file stays as the notebooks show it. Besides F and B, the
forward and the backward passes, these timelines hold O, the optimizer's step, and may hold A, the all-reduce of a
bucket of gradients, which runs while B continues.
"""

import copy
import os
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import nn

from mpdemo.measure import timeline
from mpdemo.run import builder
from mpdemo.rungs import data_parallel
from mpdemo.settings import RUNG_FORMS, checked
from mpdemo.training.setup import Run, build_model, compile_blocks
from mpdemo.world.collectives import gather_objects, whole
from mpdemo.world.env import ALLOWED_CORES, World, claim_cores, process_group, where_am_i
from mpdemo.world.processes import end_with_parent

STEADY = 1e-4  # learning rate: a trial does hundreds of steps on one batch


class Trial:
    """A rung on one batch, ready to compute its gradients or to do steps of a training run.

    The settings are not checked yet; one-process forms run in a world of one. The model is copied, by default built for
    1000 classes of RGB images; the batch holds at least ``settings.batch_size`` samples, random ones by default.
    """

    def __init__(self, settings, world, model=None, batch=None, lr=STEADY):
        processes = world.world_size if is_per_device(settings) else None
        self.s = checked(replace(settings, lr=lr), processes)
        model = copy.deepcopy(model) if model else build_model(self.s)
        place = world if is_per_device(settings) else World(device=world.device)
        self.run = Run(self.s, place, lambda: model)
        self.batch = batch or random_batch(self.s)
        self.rung = builder(self.s.rung)(self.run)
        self.devices = self.run.devices
        self.start = [buffer.clone() for buffer in self.rung.model.buffers()]
        if self.s.compile:
            compile_blocks(self.rung.model)

    def share(self):
        """Return this process's share of the trial's batch (images, labels), on its device."""
        batch = [tensor[: self.s.batch_size] for tensor in self.batch]
        images, labels = (tensor.chunk(self.rung.replicas)[self.rung.replica] for tensor in batch)
        images = images if self.rung.images else images.new_empty(len(images), 0)
        return [tensor.to(self.run.device, non_blocking=True) for tensor in (images, labels)]

    def step(self, batch=None, within=None):
        """Do one step, on the trial's batch by default, `within` a context; return its loss, still on the device."""
        self.batch = batch or self.batch
        with self.cores(), self.run.observed():
            images, labels = self.share()
            with within or nullcontext():
                result = self.rung.step(images, labels)
        return torch.zeros((), device=self.run.device) if result is None else result[0]

    @contextmanager
    def cores(self):
        """Let the threads of data_parallel have every core, also where this process has been given one."""
        own = os.sched_getaffinity(0)
        if self.s.rung == "data_parallel" and self.run.device.type == "cpu":
            os.sched_setaffinity(0, ALLOWED_CORES)  # of this thread, and so of those that it starts
        yield
        os.sched_setaffinity(0, own)

    def gradients(self) -> dict:
        """Return the gradients of one step by parameter name, sharded ones whole, without an update or a recording."""
        found = {}

        def note():  # in place of the update
            for name, parameter in self.rung.model.named_parameters():
                found[name] = whole(parameter.grad).clone()

        # cuDNN's TF32 has 10 bits, and is used for some batch sizes only: equal rungs would differ by 1e-3
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with exact, patch.object(self.rung.optimizer, "step", note), patch.object(self.run, "recorder", None):
            self.step()
        return found


def observe(trial, recorder):
    """Record all steps of a `Trial` and of its optimizer from now on."""
    trial.run.recorder = recorder
    if trial.s.rung != "data_parallel":
        recorder.watch_passes(trial.rung.model)
    elif trial.run.device.type == "cpu":
        record_threads(trial.rung.model, recorder)
    else:  # a hook of the model would be called for each copy, in threads, by the clocks of other GPUs
        recorder.watch_calls(nn.DataParallel, "forward", lambda *_, **__: recorder.next("F"))
        recorder.watch_calls(torch.Tensor, "backward", lambda *_, **__: recorder.next("B"))
    record_updates(trial.rung.optimizer, recorder)


def record_updates(optimizer, recorder):
    """Record the optimizer's steps."""
    under_way = ExitStack()
    optimizer.register_step_pre_hook(lambda *_: under_way.enter_context(recorder.operation("O")))
    optimizer.register_step_post_hook(lambda *_: under_way.close())


def record_threads(model, recorder):
    """Record what each thread of the data-parallel rung does when; the first copy of the model is the trial's own."""
    devices = {id(model): 0}

    def describe(kind, copy, *_):
        return {"kind": kind, "rank": devices.setdefault(id(copy), len(devices))}

    for name, kind in {"forward": "F", "gradients": "B"}.items():
        recorder.watch_calls(data_parallel, name, partial(describe, kind))


def recorded_steps(trial) -> list:
    """Return the timeline of every step of a trial, of all ranks that take part in it; all ranks must call this."""
    ranks = [steps for steps in gather_objects(trial and trial.run.recorder.steps) if steps]
    return [timeline.merge(step) for step in zip(*ranks, strict=True)]


def form_of(settings) -> str:
    """Return the form of a rung, the default where none is asked for."""
    return settings.form or RUNG_FORMS[settings.rung][0]


def is_per_device(settings) -> bool:
    """Whether these settings, checked or not, ask for one process per device."""
    return form_of(settings) == "per-device"


def random_batch(settings):
    """Return random images (B, C, S, S) and labels (B,), the same in every process."""
    generator = torch.Generator().manual_seed(1)
    count, size = settings.batch_size, settings.image_size
    images = torch.randn(count, 3, size, size, generator=generator, device="cpu")
    return images, torch.randint(0, 1000, (count,), generator=generator, device="cpu")


def relative_difference(values, reference) -> float:
    """Return the worst parameter's relative error, in the 2-norm; only the names in `values` are compared.

    A parameter whose gradient is zero but for rounding (a bias before a batch norm) is measured against 1 % of the
    whole gradient's norm instead.
    """
    norms = {name: tensor.double().norm().item() for name, tensor in reference.items()}
    floor = 0.01 * sum(n**2 for n in norms.values()) ** 0.5
    apart = {name: (value.double().cpu() - reference[name].double().cpu()).norm() for name, value in values.items()}
    return max((norm.item() / max(norms[name], floor) for name, norm in apart.items()), default=0.0)


@contextmanager
def join_world():
    """Join the processes that were started; yields this one's `World`."""
    end_with_parent()
    world = where_am_i()
    claim_cores(world)
    with process_group(world):
        yield world
