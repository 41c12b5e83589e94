"""What a training will hold and send, from a dry run: the rung itself does one step on fake tensors.

A fake tensor has a shape and no storage, and PyTorch's "fake" process group delivers nothing and waits for nothing. So
one process on any machine plays each rank of any training, and counts what it allocates and hands to its neighbours.
DDP averages gradients in C++, and DataParallel computes in threads, so these two are single and what they add to it.
Taught in notebooks/04_model_parallel.ipynb and 11_which_one.ipynb.
"""

import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpdemo.plan.counting import CountMessages, LiveMemory, size
from mpdemo.plan.meter import built
from mpdemo.plan.subject import DeviceMemory, Subject
from mpdemo.rules import CUT_RUNGS
from mpdemo.run import Run
from mpdemo.schedules import usual_stages_per_rank
from mpdemo.world.env import World


class Counted(NamedTuple):
    """What one process holds, by device, and sends: collective -> bytes."""

    devices: list
    messages: dict


class DryRun(Run):
    """One step of a rung, in which memory and messages are counted."""

    def __init__(self, subject, settings, rank, states, keep_gradients):
        world = settings.processes
        super().__init__(settings, World(rank=rank, world_size=world, local_rank=rank, local_world_size=world))
        self.subject, self.states, self.keep_gradients = subject, states, keep_gradients
        if settings.form == "one-process" and settings.devices > 1:
            self.devices = [torch.device("cpu", number) for number in range(settings.devices)]
            self.device = self.devices[0]
        self.memory, self.sent, self.modes = LiveMemory(), CountMessages(), ExitStack()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def model(self):
        """Return the model on fake tensors."""
        shares = self.s.devices if self.s.rung == "fsdp" else self.s.replicas or 1
        with self.fake:
            model, self.sample = built(self.subject, self.s.batch_size // shares // self.s.microbatches)
        model.input_shape, model.input_type = self.sample.shape[1:], self.sample.dtype
        model.blocks()[-1].register_forward_hook(flat)
        return self.prepared(model)

    def optimizer(self, parameters):
        """Return what stands for an optimizer that has its states already."""
        with self.fake:
            return Update(list(parameters), self.states, self.keep_gradients)

    def batches(self, model, optimizer, replicas=1, replica=0, *, images=True, **others):
        """Yield a batch, with counting on."""
        self.held, self.updates, count = model, optimizer, self.s.batch_size // replicas
        self.modes.enter_context(self.fake)  # not before: a mesh of devices is made of real numbers
        shape = self.sample.shape[1:] if images else (0,)
        images = torch.empty(count, *shape, dtype=self.sample.dtype, device=self.device)
        labels = torch.zeros(count, dtype=torch.long, device=self.device)
        self.memory.start()
        self.modes.enter_context(self.sent)
        yield images, labels
        self.modes.close()

    def log(self, loss, outputs, labels):
        """Keep nothing."""

    def counted(self) -> Counted:
        """Return what the step held and sent."""
        result = []
        for device in self.devices:
            own = [p for p in self.held.parameters() if p.device == device]
            weights, buffers = bytes_of(own), bytes_of(b for b in self.held.buffers() if b.device == device)
            states = self.states * weights
            activations = self.memory.peak(str(device)) - 2 * weights - buffers - states
            result.append(DeviceMemory(self.rank + len(result), weights + buffers, weights, states, activations))
        return Counted(result, self.sent.by_kind())


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
        """Allocate what AdamW needs beside its states for the largest parameter."""
        if self.kept and len(self.kept[0]) == 2:
            largest = max((local(p) for p in self.parameters), key=torch.numel)
            temporary = torch.empty_like(largest), torch.empty_like(largest)
            del temporary


def flat(block, inputs, outputs):
    """Turn outputs of any shape into rows, from which a loss can be computed."""
    return outputs if outputs.dim() == 2 else outputs.reshape(len(outputs), -1)


def local(parameter):
    """Return this rank's part of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def bytes_of(tensors) -> int:
    """Return the bytes of this rank's part of tensors."""
    return size([local(tensor) for tensor in tensors])


def moved(module, *args, **kwargs):
    """Stand in for `nn.Module.to`, which cannot swap fake tensors."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to(*args, **kwargs), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(*args, **kwargs)
    return module


@cache
def step(subject, settings, rank=0, states=0, keep_gradients=False) -> Counted:
    """Run one step of a rank."""
    if settings.form == "per-device":
        dist.init_process_group("fake", rank=rank, world_size=settings.processes, store=FakeStore())
    run, to = DryRun(subject, settings, rank, states, keep_gradients), nn.Module.to
    nn.Module.to = moved
    try:
        with run.memory, warnings.catch_warnings(action="ignore"):
            import_module(f"mpdemo.rungs.{settings.rung}").train(run)
        return run.counted()
    finally:
        nn.Module.to = to
        run.modes.close()
        if settings.form == "per-device":
            dist.destroy_process_group()


def few_steps(subject, settings, *others) -> Counted:
    """Return `step`; of many microbatches two smaller numbers are run, since each further one adds the same."""
    s, count, P = settings, settings.microbatches, settings.devices
    several = s.rung in CUT_RUNGS and s.form == "per-device" and usual_stages_per_rank(s.schedule) > 1
    few, more = (2 * P, P) if several else (P + 1 if s.rung in CUT_RUNGS else 2, 1)
    if count <= 2 * few + more or (count - few) % more:
        return step(subject, s, *others)
    one = s.batch_size // count
    small, large = (step(subject, replace(s, microbatches=n, batch_size=n * one), *others) for n in (few, few + more))
    times = (count - few) // more

    def line(a, b):
        return a + times * (b - a)

    devices = [
        replace(a, activations=line(a.activations, b.activations))
        for a, b in zip(small.devices, large.devices, strict=True)
    ]
    return Counted(devices, {kind: line(a, large.messages[kind]) for kind, a in small.messages.items()})


def processes(subject, settings, states, keep_gradients=False) -> list[Counted]:
    """Return what every process of a training holds and sends."""
    s = settings
    if dist.is_initialized():  # this process plays a part in another group; a new one plays the ranks
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as another:
            return another.submit(processes, subject, s, states, keep_gradients).result()
    if s.rung in ("ddp", "data_parallel"):
        return _replicas(subject, s, states)
    first = list(range(s.devices if s.rung in CUT_RUNGS else 1))  # the other replicas are like this one
    alike = [rank // (s.replicas or 1) if s.mesh == "pp-dp" else rank % s.devices for rank in range(s.processes)]
    ranks = [alike.index(number) for number in first] if s.form == "per-device" and s.rung in CUT_RUNGS else [0]
    played = [few_steps(subject, s, rank, states, keep_gradients) for rank in ranks]
    return [played[number % len(played)] for number in alike]


def of_training(settings) -> list[Counted]:
    """Return what every process of a training holds and sends, from its checked settings."""
    from mpdemo import data

    s = settings
    facts = data.load(s.dataset, s.data, s.image_size, s.seed)
    subject = Subject(s.model, s.image_size, facts.classes, facts.channels, s.norm)
    return processes(subject, s, {"sgd": 1, "adamw": 2}[s.optimizer])  # this course's SGD has momentum


def _replicas(subject, settings, states) -> list[Counted]:
    """Return what DDP's processes hold, or the devices of one process: each is a single device with its share.

    DDP keeps the gradients from one step to the next, in its buckets; those of several parts are added up beside them.
    """
    s, ddp, parts = settings, settings.rung == "ddp", settings.microbatches
    alone = replace(s, rung="single", form="one-process", batch_size=s.batch_size // s.devices, devices=1, processes=1)
    (device,), _ = few_steps(subject, alone, 0, states, ddp and parts == 1)
    if not ddp:
        return [Counted([device, *[replace(device, optimizer=0)] * (s.devices - 1)], {})]
    if parts > 1:
        device = replace(device, gradients=2 * device.gradients)
    gradients = device.gradients // min(parts, 2)
    sent = {"all-reduce": gradients} | ({"broadcast": device.weights - gradients} if device.weights > gradients else {})
    return [Counted([device], sent)] * s.devices


def devices(subject, settings, states, keep_gradients=False) -> list[DeviceMemory]:
    """Return the peak memory of every device, in the order of the ranks.

    Parameters
    ----------
    subject : mpdemo.plan.memory.Subject
    settings : Settings
        As `mpdemo.settings.checked` returns them.
    states : int
        Values that the optimizer keeps for each parameter.
    keep_gradients : bool
        Whether ``zero_grad`` fills the gradients with zeros instead of dropping them.
    """
    found = [device for each in processes(subject, settings, states, keep_gradients) for device in each.devices]
    return [replace(device, device=number) for number, device in enumerate(found)]
