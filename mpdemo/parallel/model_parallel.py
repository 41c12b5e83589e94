"""Rung 4, naive model parallelism: the layers are cut over the devices, and one device is busy at a time.

It makes room for a model that fits no single device; it does not make anything faster. Two forms: one process that
moves activations from device to device, and one process per device that sends them.
Taught in notebooks/04_model_parallel.ipynb.
Source: https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html.
"""

import torch.distributed as dist

from mpdemo.models import resolve_cut
from mpdemo.parallel.per_device import make_recorder, receive, stage_shapes, walk
from mpdemo.parallel.rung import Rung, count_correct, local_devices, loss_fn
from mpdemo.schedules import placement


class OneProcess(Rung):
    """One process drives all devices: each stage on its own, the activations are moved in between."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.devices = local_devices(world, settings.devices)
        points = resolve_cut(model.names, settings.cut, len(self.devices))
        self.stages = [stage.to(device) for stage, device in zip(model.cut(points), self.devices, strict=True)]

    def step(self, images, labels):
        """Forward through all stages, backward through all. See `Rung.step`."""
        images, labels = self.to_device(images, labels)
        outputs = self.forward(images)
        labels = labels.to(outputs.device)  # the loss is computed where the outputs are
        loss = loss_fn(outputs, labels)
        loss.backward()  # adds to parameter.grad, on one device after the other
        return loss.detach(), count_correct(outputs, labels)

    def forward(self, images):
        """Move the activations to each stage's device. See `Rung.forward`."""
        for stage, device in zip(self.stages, self.devices, strict=True):
            images = stage(images.to(device, non_blocking=True))
        return images


class PerDevice(Rung):
    """One process per device: each holds one stage, activations and their gradients are sent between neighbours."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.owners = placement("naive", world.world_size)  # the rank of each stage: stage i is on rank i
        points = resolve_cut(model.names, settings.cut, len(self.owners))
        self.shapes = stage_shapes(model, points, settings)
        self.stages = [model.cut(points)[i].to(self.device) for i, rank in enumerate(self.owners) if rank == self.rank]
        self.has_input, self.has_output = self.rank == self.owners[0], self.rank == self.owners[-1]
        self.recorder = make_recorder(settings, world)

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

    def forward(self, images):
        """See `Rung.forward`."""
        return walk(self.stages, self.owners, self.shapes, images)
