"""A rung built on one batch, on its own: for its gradients, or to be timed in turn with others (harness.py)."""

import copy
import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from mpdemo import models, parallel
from mpdemo.settings import RUNG_FORMS, checked
from mpdemo.timeline import read
from mpdemo.training.build import make_optimizer
from mpdemo.world.collectives import gather_objects, whole
from mpdemo.world.env import ALLOWED_CORES, World


class Trial:
    """A rung on one batch, ready to compute its gradients or to do steps of a training.

    Parameters
    ----------
    settings : Settings
        Not checked yet. The one-process forms are built in a world of one.
    world : World
    model : Blocks, optional
        Copied; by default built as the settings say, for 1000 classes of RGB images.
    batch : tuple of torch.Tensor, optional
        Images (B, C, S, S) and labels (B,) of at least ``settings.batch_size`` samples; random by default.
    """

    def __init__(self, settings, world, model=None, batch=None):
        per_device = is_per_device(settings)
        self.world = world if per_device else World(device=world.device, backend=world.backend)
        self.settings = s = checked(settings, world.world_size if per_device else None)
        model = copy.deepcopy(model) if model else build_model(s)
        images, labels = batch or random_batch(s)
        self.all_cores = s.rung == "data_parallel" and world.device.type == "cpu"
        with all_cores(self.all_cores):  # its threads keep the cores that are allowed when they start
            self.rung = parallel.make(model, self.world, s)
            self.images, self.labels = self.share(images, labels)
            parameters = self.rung.named_parameters().values()
            self.devices = {parameter.device for parameter in parameters}
            self.optimizer = make_optimizer(parameters, replace(s, lr=1e-4))  # hundreds of steps on one batch
            if self.all_cores:
                self.gradients()

    def share(self, images, labels):
        """Return what this process takes of a batch."""
        size, replicas, replica = self.settings.batch_size, self.rung.replicas, self.rung.replica
        images, labels = (tensor[:size].chunk(replicas)[replica] for tensor in (images, labels))
        return images if self.rung.has_input else images.new_empty(len(images), 0), labels

    def weights(self) -> dict:
        """Return the weights that this process has by name, sharded ones whole."""
        return {name: whole(parameter.detach()) for name, parameter in self.rung.named_parameters().items()}

    def step(self, batch=None):
        """Do one step of the training loop, on the trial's batch by default; return the loss, still on the device.

        A rung with a recorder records it.
        """
        with self.rung.recorder.step() if self.rung.recorder else nullcontext():
            self.optimizer.zero_grad()
            loss, _ = self.rung.step(*(batch or (self.images, self.labels)))
            self.optimizer.step()
        return loss

    def gradients(self) -> dict:
        """Return the gradients of one step by parameter name, sharded ones whole, without an update."""
        self.optimizer.zero_grad()
        self.rung.step(self.images, self.labels)
        return {name: whole(parameter.grad) for name, parameter in self.rung.named_parameters().items()}


def recorded_steps(trial) -> list:
    """Return the timeline of every step of a trial, of all ranks that take part in it; all ranks must call this."""
    ranks = [steps for steps in gather_objects(trial and trial.rung.recorder.steps) if steps]
    return [read.merge(list(step)) for step in zip(*ranks, strict=True)]


def is_per_device(settings) -> bool:
    """Whether these settings, checked or not, ask for one process per device."""
    return (settings.form or RUNG_FORMS[settings.rung][0]) == "per-device"


def build_model(settings, classes=1000, channels=3):
    """Return the model of the settings, for a data set of these classes and channels."""
    size = settings.image_size
    return models.build(settings.model, classes=classes, channels=channels, image_size=size, norm=settings.norm)


def random_batch(settings, classes=1000, channels=3):
    """Return random images (B, C, S, S) and labels (B,), the same in every process."""
    generator, size = torch.Generator().manual_seed(1), settings.image_size
    images = torch.randn(settings.batch_size, channels, size, size, generator=generator)
    return images, torch.randint(0, classes, (settings.batch_size,), generator=generator)


@contextmanager
def all_cores(wanted=True):
    """Let this process use every core of its allocation for a ``with`` block, as its threads need them."""
    if not wanted or ALLOWED_CORES is None:
        yield
        return
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALLOWED_CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)
