"""Rung 4, naive model parallelism: the layers are cut over the devices, and one device is busy at a time.

It makes room for a model that fits no single device; it does not make anything faster. Two forms: one process that
moves activations from device to device, and one process per device that sends them.
Taught in notebooks/04_model_parallel.ipynb.
Source: https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html.
"""

import torch.distributed as dist

from mpdemo.parallel.one_process import CutOverDevices
from mpdemo.parallel.per_device import CutOverProcesses, receive
from mpdemo.parallel.rung import count_correct, loss_fn
from mpdemo.schedules import placement


class OneProcess(CutOverDevices):
    """One process drives all devices: each stage on its own, the activations are moved in between."""

    def forward(self, images):
        """Move the activations to each stage's device. See `Rung.forward`."""
        for stage, device in zip(self.stages, self.devices, strict=True):
            images = stage(images.to(device, non_blocking=True))
        return images


class PerDevice(CutOverProcesses):
    """One process per device: each holds one stage, activations and their gradients are sent between neighbours."""

    def __init__(self, model, world, settings):
        owners = placement("naive", world.world_size)  # stage i is on rank i
        super().__init__(model, world, settings, owners)

    def step(self, images, labels):
        """Receive, forward, send; then receive the gradient, backward, send. See `Rung.step`."""
        images, labels = self.to_device(images, labels)
        gradient = None
        if not self.has_input:
            images = receive(self.shapes[self.rank][0], self.rank - 1, self.device).requires_grad_()
        with self.record("F"):
            outputs = self.stages[0](images)
            result = loss_fn(outputs, labels) if self.has_output else outputs
        if not self.has_output:
            dist.send(outputs.detach(), self.rank + 1)
            gradient = receive(outputs, self.rank + 1, self.device)
        with self.record("B"):
            result.backward(gradient)
        if not self.has_input:
            dist.send(images.grad.contiguous(), self.rank - 1)
        return (result.detach(), count_correct(outputs, labels)) if self.has_output else self.no_result()
