"""Rung 4, naive model parallelism: the layers are cut over the devices, and one device is busy at a time.

It makes room for a model that fits no single device; it does not make anything faster. Two forms: one process that
moves activations from device to device, and one process a device with ``torch.distributed.pipelining`` and a single
microbatch. Taught in notebooks/04_model_parallel.ipynb.
Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html.
"""

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from mpdemo.models import resolve_cut
from mpdemo.parallel.rung import Rung, count_correct, local_devices, loss_fn
from mpdemo.parallel.stages import recorder_for, stage_examples, walk


class OneProcess(Rung):
    """One process drives all devices: each stage on its own, the activations are moved in between."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.devices = local_devices(world, settings.devices)
        points = resolve_cut(model.names, settings.cut, len(self.devices))
        self.stages = [stage.to(device) for stage, device in zip(model.cut(points), self.devices, strict=True)]

    def step(self, images, labels):
        """Forward through all stages, backward through all. See `Rung.step`."""
        outputs = self.forward(images)
        labels = labels.to(outputs.device, non_blocking=True)  # the loss is computed where the outputs are
        loss = loss_fn(outputs, labels)
        loss.backward()  # walks back over the devices by itself
        return loss.detach().to(self.device), count_correct(outputs, labels).to(self.device)

    def forward(self, images):
        """See `Rung.forward`."""
        x = images
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device, non_blocking=True))
        return x


class PerDevice(Rung):
    """One process a device: each holds one stage, activations and their gradients are sent between neighbours."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        count = world.world_size
        points = resolve_cut(model.names, settings.cut, count)
        self.owners = list(range(count))  # stage i is held by rank i
        self.examples = stage_examples(model, points, settings)
        self.stages = [model.cut(points)[world.rank].to(self.device)]
        self.pipeline_stages = [
            PipelineStage(self.stages[0], world.rank, count, self.device, *self.examples[world.rank])
        ]
        self.recorder = recorder_for(settings, world, self.pipeline_stages)
        loss = self.recorder.loss(loss_fn) if self.recorder else loss_fn
        self.has_input, self.has_output = world.rank == 0, world.rank == count - 1
        self.schedule = ScheduleGPipe(self.pipeline_stages[0], n_microbatches=1, loss_fn=loss)

    def step(self, images, labels):
        """This stage's forward and backward. See `Rung.step`."""
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        inputs = (images,) if self.has_input else ()
        losses = []
        targets = {"target": labels, "losses": losses} if self.has_output else {}
        outputs = self.schedule.step(*inputs, **targets)
        if not self.has_output:
            return torch.zeros((), device=self.device), torch.zeros((), dtype=torch.long, device=self.device)
        return torch.stack(losses).mean().detach(), count_correct(outputs, labels)

    def forward(self, images):
        """See `Rung.forward`."""
        return walk(self.stages, self.owners, self.examples, images)
