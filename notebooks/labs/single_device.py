"""What one step on one device costs: reading losses, parts of a step, loader processes, memory.

    python -m mpdemo.labs.single_device runs/lab reading loading parts memory

Runs in one process and writes ``summary.json`` in the folder. All times are seconds.
Taught in notebooks/01_single_device.ipynb.
"""

import os
import sys
import time
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from mpdemo import data, models
from mpdemo.compare import model_and_batch, run_lab
from mpdemo.notebook.recipe import recipe
from mpdemo.paired import ROUNDS
from mpdemo.plan.counting import peak_of_a_step
from mpdemo.plan.dry_run import local
from mpdemo.plan.dry_run import step as dry_step
from mpdemo.plan.request import ModelSpec, settled
from mpdemo.settings import Settings
from mpdemo.trial import Trial
from mpdemo.world.clock import now
from mpdemo.world.launch import end

COURSE = Settings(**recipe("single"))
CONVNET = Settings(rung="single", model="convnet", batch_size=128)
ALONE = 7  # steps of a measurement without a loader


def reading(world, rounds=ROUNDS, steps=5):
    """Time a step of the ConvNet: the loss read in every step, read once at the end, and without waiting."""
    trial = Trial(CONVNET, world, *model_and_batch(CONVNET))
    seconds = {"every step": [], "at the end": [], "without waiting": []}
    for _ in range(rounds):
        begin = now(world.device)
        for _ in range(steps):
            trial.step().item()
        seconds["every step"].append((now(world.device) - begin) / steps)
        begin = now(world.device)
        losses = [trial.step() for _ in range(steps)]
        seconds["without waiting"].append((time.perf_counter() - begin) / steps)
        losses[-1].item()
        seconds["at the end"].append((now(world.device) - begin) / steps)
    return seconds


class RemoteImages(Dataset):
    """Images that come one by one from a slow file system: each takes `seconds`, in which no core works."""

    def __init__(self, dataset, seconds):
        self.dataset, self.seconds = dataset, seconds

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.dataset[index]


def loading(world, workers=(0, 1, 2, 4), seconds_per_image=0.001):
    """Return the time of a step of the ConvNet with 0, 1, ... loader processes, and of its two parts alone.

    The device's own time, on a batch that is there, is a lower limit for all others: the least of several measurements.
    Also returns the CPU time that the loader processes used per batch, with their start.
    """
    digits, trial = data.load("digits"), Trial(CONVNET, world, *model_and_batch(CONVNET))
    slow = replace(digits, train=RemoteImages(digits.train, seconds_per_image))
    loaders = {count: data.Loaders(slow, CONVNET.batch_size, workers=count).train for count in workers}
    load = mean_seconds(loaders[0], lambda batch: None, world.device)
    steps, cpu, alone = {}, {}, []
    for count, loader in loaders.items():
        before = cpu_of_children()
        steps[count] = mean_seconds(loader, trial.step, world.device)
        cpu[count] = (cpu_of_children() - before) / (len(slow.train) // CONVNET.batch_size)
        alone.append(mean_seconds(ALONE * [None], trial.step, world.device))
    return {"load": load, "device": min(alone), "workers": steps, "loaders_cpu": cpu}


def cpu_of_children():
    """Return the CPU time of all processes that this one has started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def mean_seconds(batches, work, device, warmup=2):
    """Return the time per batch, to get it and to work on it; the first ones are left out."""
    for number, batch in enumerate(batches):
        if number == warmup:
            begin = now(device)
        work(batch)
    return (now(device) - begin) / (number + 1 - warmup)


def parts(world):
    """For ConvNet and transformer: the time of each part of a step, and what the arithmetic explains of it."""
    return {settings.model: parts_of(settings, world.device) for settings in (CONVNET, COURSE)}


def parts_of(settings, device, rounds=ROUNDS):
    """Return the time of every part (a list, one number per round), and the counted operations."""
    model = models.build(settings.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    loader, seconds = iter(data.Loaders(data.load("digits"), settings.batch_size).train), []
    for _ in range(2 + rounds):
        times = [now(device)]
        images, labels = (tensor.to(device) for tensor in next(loader))
        times.append(now(device))
        loss = cross_entropy(model(images), labels)
        times.append(now(device))
        loss.backward()
        times.append(now(device))
        optimizer.step()
        optimizer.zero_grad()
        times.append(now(device))
        seconds.append([end - begin for begin, end in pairwise(times)])
    named = zip(("load", "forward", "backward", "update"), zip(*seconds[2:], strict=True), strict=True)
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(model(images), labels)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counted = {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}
    return {"seconds": dict(named), "counted": counted, "products": share_of_products(model, images)}


def share_of_products(model, batch):
    """Return the share of the forward pass's time in the layers whose arithmetic is counted: convolutions, linear."""
    times = []  # when a layer begins and ends, when the next one does

    def note(*_):
        times.append(now(batch.device))

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_pre_hook(note)
            layer.register_forward_hook(note)
    begin = now(batch.device)
    model(batch)
    return (sum(times[1::2]) - sum(times[::2])) / (now(batch.device) - begin)


def memory(world, sizes=(16, 32, 64)):
    """Return bytes: what the course model keeps between two steps, the peak with several batches, the levels of a step.

    The levels, one per allocation, are computed with fake tensors for the largest batch.
    """
    variants = {str(size): replace(COURSE, batch_size=size) for size in sizes}
    variants[f"{sizes[-1]} in 4 parts"] = replace(COURSE, batch_size=sizes[-1], microbatches=4)
    trials = {name: Trial(settings, world, *model_and_batch(settings)) for name, settings in variants.items()}
    peaks = {name: peak_of_a_step(trial) for name, trial in trials.items()}
    trial = trials[str(sizes[-1])]
    kept = stored(trial)
    kept["AdamW"] = kept.pop("optimizer")
    course = ModelSpec("transformer", image_size=28, classes=10, channels=1)
    levels = dry_step(course, settled(course, "single", sizes[-1]), states=2).levels[0]
    return {"kept": kept, "peaks": peaks, "levels": list(levels)}


def stored(trial) -> dict:
    """Return the bytes of the weights, gradients and optimizer states that this rank keeps between two steps."""
    weights = list(trial.rung.model.parameters())
    states = [value for state in trial.rung.optimizer.state.values() for value in state.values()]
    states = [state for state in states if state.dim()]  # not the count of steps, a scalar
    kept = {"weights": weights, "gradients": [weight.grad for weight in weights], "optimizer": states}
    return {name: sum(local(t).nbytes for t in tensors) for name, tensors in kept.items()}


if __name__ == "__main__":
    functions = {"reading": reading, "loading": loading, "parts": parts, "memory": memory}
    end(run_lab(functions, sys.argv[1], sys.argv[2:]))
