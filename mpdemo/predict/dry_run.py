"""One step of a rung on fake tensors: what a process holds and sends, counted without any device.

A fake tensor has a shape and no storage, and PyTorch's "fake" process group delivers nothing and waits for nothing. So
one process on any machine plays each rank of any training, and counts what it allocates and hands to its neighbours.
memory.py asks for the steps. Taught in notebooks/04_model_parallel.ipynb and 12_which_one.ipynb.
"""

import gc
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mpdemo.models.private_torch import FakeStore, FakeTensors, without_cuda_guards
from mpdemo.predict.counting import CountMessages, LiveMemory, size
from mpdemo.predict.device_memory import DeviceMemory, Step
from mpdemo.predict.meter import built
from mpdemo.run import builder
from mpdemo.training.setup import Run
from mpdemo.world.env import World


class DryRun:
    """One step of a rung on fake tensors, in which memory and messages are counted."""

    def __init__(self, spec, settings, rank, states, keep_gradients):
        world, several = settings.processes, settings.form == "one-process" and settings.devices > 1
        devices = [torch.device("cpu", number) for number in range(settings.devices)] if several else None
        place = World(rank, world, rank, world, devices[0] if devices else torch.device("cpu"))
        self.run = Run(settings, place, self.make_model, self.make_optimizer, devices)
        self.spec, self.states, self.keep_gradients = spec, states, keep_gradients
        self.memory, self.sent = LiveMemory(), CountMessages()
        self.arrived = {}  # id of a parameter: the level after which its gradient came
        self.fake = FakeTensors(allow_non_fake_inputs=True)

    def make_model(self):
        """Return the model on fake tensors."""
        s = self.run.s
        shares = s.devices if s.rung == "fsdp" else s.replicas or 1
        with self.fake:
            model, self.sample = built(self.spec, s.batch_size // shares // s.microbatches)
        model.input_shape = self.sample.shape[1:]
        return model

    def make_optimizer(self, parameters, **options):
        """Return what stands for an optimizer that has its states already, whatever its options."""
        trained = [p for p in parameters if p.requires_grad]
        for p in trained if not self.keep_gradients else []:
            p.register_post_accumulate_grad_hook(self.arrive)
        with self.fake:
            return Update(trained, self.states, self.keep_gradients)

    def arrive(self, parameter):
        """Note when the gradient of a parameter is there for the first time."""
        self.arrived.setdefault(id(parameter), len(self.memory.levels[str(parameter.device)]))

    def step(self):
        """Build the rung and do its step, with counting on."""
        run = self.run
        rung = builder(run.s.rung)(run)
        self.held, count = rung.model, run.s.batch_size // rung.replicas
        shape = self.sample.shape[1:] if rung.images else (0,)
        with self.fake:  # not before: a mesh of devices is made of real numbers
            images = torch.empty(count, *shape, dtype=self.sample.dtype, device=run.device)
            labels = torch.zeros(count, dtype=torch.long, device=run.device)
            self.batch = size([images, labels])
            self.memory.start()
            with self.sent if run.world > 1 else nullcontext():
                rung.step(images, labels)

    def counted(self) -> Step:
        """Return what the step held and sent."""
        always, arrived, rank = [], [], self.run.rank
        for device in self.run.devices:
            parameters = [p for p in self.held.parameters() if p.device == device]
            trained = [p for p in parameters if p.requires_grad]
            gradients = size([local(p) for p in trained])
            # zero-bubble schedules do not tell when the gradient of a weight comes: then from the beginning
            arrived.append([(self.arrived.get(id(p), 0), size(local(p))) for p in trained])
            buffers = size([buffer for buffer in self.held.buffers() if buffer.device == device])
            weights = size([local(p) for p in parameters]) + buffers
            always.append(DeviceMemory(rank + len(always), weights, gradients, self.states * gradients, 0))
        levels = [np.array(self.memory.levels[str(device)], dtype=float) for device in self.run.devices]
        return Step(always, levels, arrived, self.sent.by_kind(), size(list(self.held.buffers())), self.batch)


class Update:
    """The memory of an optimizer: so many states like each parameter, and AdamW's two temporary tensors."""

    def __init__(self, parameters, states, keep_gradients):
        self.parameters, self.keep_gradients = parameters, keep_gradients
        self.kept = [[torch.empty_like(local(p)) for _ in range(states)] for p in parameters]
        for p in parameters if keep_gradients else []:
            p.grad = torch.empty_like(p)

    def zero_grad(self):
        """Drop the gradients, unless they are kept."""
        for p in self.parameters if not self.keep_gradients else []:
            p.grad = None

    def step(self):
        """Allocate what AdamW needs besides its states for the largest parameter."""
        if self.kept and len(self.kept[0]) == 2:
            largest = max((local(p) for p in self.parameters), key=torch.numel)
            temporary = torch.empty_like(largest), torch.empty_like(largest)
            del temporary


def local(parameter):
    """Return this rank's part of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def moved(module, *args, **kwargs):
    """Stand in for `nn.Module.to`, which cannot swap fake tensors."""
    swapped = {}  # a shared parameter is moved once
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in swapped:
                    there = parameter.detach().to(*args, **kwargs)
                    swapped[parameter] = nn.Parameter(there, parameter.requires_grad)
                part._parameters[name] = swapped[parameter]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(*args, **kwargs)
    return module


@contextmanager
def without_surprises():
    """Free nothing at a moment that differs from run to run, compile nothing, warn of nothing; `moved` moves."""
    collected = gc.isenabled()
    gc.disable()
    eager, quiet = torch.compiler.set_stance("force_eager"), warnings.catch_warnings(action="ignore")
    try:
        with patch.object(nn.Module, "to", moved), without_cuda_guards(), eager, quiet:
            yield
    finally:
        if collected:
            gc.enable()


@cache
def step(spec, settings, rank=0, states=0, keep_gradients=False) -> Step:
    """Do one step of a rank.

    In a thread of its own: DTensor keeps what it has found of meshes for each thread, and a thread that had real
    processes would go on with the groups of that world.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(counted_step, spec, settings, rank, states, keep_gradients).result()


def counted_step(spec, settings, rank, states, keep_gradients) -> Step:
    """Do one step of a rank in this thread."""
    dry = DryRun(spec, settings, rank, states, keep_gradients)
    with fake_world(rank, settings.processes) if settings.form == "per-device" else nullcontext():
        with dry.memory, without_surprises():
            dry.step()
        return dry.counted()


@contextmanager
def fake_world(rank, processes):
    """Be one of so many processes, none of which is there: a group that delivers nothing and waits for nothing."""
    excepthook = sys.excepthook  # which PyTorch replaces
    dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
