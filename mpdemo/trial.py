"""A rung driven from outside, one step at a time: for its gradients, or to be timed alternately with others.

A rung owns its loop and asks for one batch after the other. Here it runs in a thread of its own, which waits at that
place until `Trial.step` brings a batch, and comes back to it when the step is done. One thread works at a time.
"""

import copy
import os
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module

import torch

from mpdemo import models
from mpdemo.errors import RunFailed
from mpdemo.run import Run
from mpdemo.settings import RUNG_FORMS, checked
from mpdemo.training.between import compile_blocks
from mpdemo.world.collectives import whole
from mpdemo.world.env import ALLOWED_CORES, World, claim_cores, process_group, where_am_i
from mpdemo.world.processes import end_with_parent

PATIENCE = 600.0  # seconds of a step, the first one with its compilation; a lost peer is found earlier
STEADY = 1e-4  # learning rate: a trial does hundreds of steps on one batch


class Trial(Run):
    """A rung on one batch, ready to compute its gradients or to do steps of a training run.

    The settings are not checked yet; one-process forms run in a world of one. The model is copied, by default built for
    1000 classes of RGB images; the batch holds at least ``settings.batch_size`` samples, random ones by default.
    """

    def __init__(self, settings, world, model=None, batch=None, lr=STEADY):
        processes = world.world_size if is_per_device(settings) else None
        super().__init__(checked(replace(settings, lr=lr), processes), place_of(settings, world))
        self.given, self.batch = copy.deepcopy(model) if model else build_model(self.s), batch or random_batch(self.s)
        self.over, self.turn, self.done, self.error = False, threading.Semaphore(0), threading.Semaphore(0), None
        threading.Thread(target=self._train, daemon=True).start()
        self._wait()  # until the rung asks for its first batch

    def _train(self):
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread has the first one
        else:
            torch.set_num_threads(1)
            if self.s.rung == "data_parallel":
                os.sched_setaffinity(0, ALLOWED_CORES)  # of this thread, and so of those that it starts
        try:
            import_module(f"mpdemo.rungs.{self.s.rung}").train(self)
        except BaseException as error:
            self.error = error
        self.done.release()

    def _wait(self):
        if not self.done.acquire(timeout=PATIENCE):
            raise RunFailed(f"a step of --rung {self.s.rung} did not end within {PATIENCE:.0f} s on rank {self.rank}")
        if self.error:
            raise self.error

    # what the rung asks for

    def model(self):
        return self.prepared(self.given)

    def batches(self, model, optimizer, replicas=1, replica=0, *, group=None, evaluate=None, images=True, output=True):
        self.held, self.updates, self.evaluate, self.counts = model, optimizer, evaluate or model, output
        self.replicas, self.replica, self.group, self.takes_images = replicas, replica, group, images
        self.start = [buffer.clone() for buffer in model.buffers()]
        if self.s.compile:
            compile_blocks(model)
        while True:
            self.done.release()
            self.turn.acquire()
            if self.over:
                return
            if self.recorder:
                self.recorder.begin_step()
            batch = self.next_batch()
            with self.within or nullcontext():
                yield batch
            if self.recorder:
                self.recorder.end_step()

    def next_batch(self):
        """Return this replica's share of the trial's batch, on the device."""
        images, labels = (tensor[: self.s.batch_size] for tensor in self.batch)
        images, labels = (tensor.chunk(self.replicas)[self.replica] for tensor in (images, labels))
        images = images if self.takes_images else images.new_empty(len(images), 0)
        return self.to_device(images), self.to_device(labels)

    def log(self, loss, outputs, labels):
        self.loss = self.loss + loss.detach()

    # what drives it

    def step(self, batch=None, within=None):
        """Do one step of the rung's loop, on the trial's batch by default; return its loss, still on the device.

        A context manager `within` is entered in the rung's thread.
        """
        self.batch, self.loss, self.within = batch or self.batch, torch.zeros((), device=self.device), within
        self.turn.release()
        self._wait()
        return self.loss

    def end(self):
        """Let the rung's loop end where it asks for a batch, so that its memory is free for the next trial."""
        self.over = True
        self.turn.release()
        self._wait()

    def gradients(self) -> dict:
        """Return the gradients of one step by parameter name, sharded ones whole, without an update or a recording."""
        found, recorder = {}, self.recorder
        self.recorder = None
        self.updates.step = lambda: found.update(
            {name: whole(p.grad).clone() for name, p in self.held.named_parameters()}
        )
        self.step()
        del self.updates.step
        self.recorder = recorder
        return found


def form_of(settings) -> str:
    """Return the form of a rung, the default where none is asked for."""
    return settings.form or RUNG_FORMS[settings.rung][0]


def is_per_device(settings) -> bool:
    """Whether these settings, checked or not, ask for one process per device."""
    return form_of(settings) == "per-device"


def place_of(settings, world) -> World:
    """Return where this process stands in a rung of these settings: a one-process form has a world of one."""
    return world if is_per_device(settings) else World(device=world.device)


def build_model(settings, classes=1000, channels=3):
    """Return the model of the settings, for a data set of these classes and channels."""
    shape = {"classes": classes, "channels": channels, "image_size": settings.image_size}
    return models.build(settings.model, norm=settings.norm, seed=settings.seed, **shape)


def random_batch(settings, classes=1000, channels=3):
    """Return random images (B, C, S, S) and labels (B,), the same in every process."""
    generator, size = torch.Generator().manual_seed(1), settings.image_size
    images = torch.randn(settings.batch_size, channels, size, size, generator=generator, device="cpu")
    return images, torch.randint(0, classes, (settings.batch_size,), generator=generator, device="cpu")


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
    """Join the processes that torchrun, Slurm or a plain ``python`` started; yields this one's `World`."""
    end_with_parent()
    world = where_am_i()
    claim_cores(world)
    with process_group(world):
        yield world
