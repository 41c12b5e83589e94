"""Rung 5, pipelined model parallelism: the batch is cut into microbatches, so that the stages work at the same time.

Against the rung below: more microbatches, and a schedule that says in which order a device works on them.
Two forms, as there. Taught in notebooks/05_pipeline.ipynb. Sources: GPipe https://arxiv.org/abs/1811.06965,
1F1B https://arxiv.org/abs/1806.03377, interleaved https://arxiv.org/abs/2104.04473, zero bubble and ZBV
https://arxiv.org/abs/2401.10241.
"""

import torch
from torch.distributed import pipelining

from mpdemo.models import resolve_cut
from mpdemo.parallel.per_device import make_recorder, pipeline_stages, stage_shapes, walk
from mpdemo.parallel.rung import Rung, count_correct, local_devices, loss_fn
from mpdemo.schedules import placement

SCHEDULE_CLASSES = {
    "naive": pipelining.ScheduleGPipe,  # with one microbatch
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class OneProcess(Rung):
    """One process drives all devices. Overlap comes from GPU kernels that return at once; a CPU has none."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.devices = local_devices(world, settings.devices)
        points = resolve_cut(model.names, settings.cut, len(self.devices))
        self.stages = [stage.to(device) for stage, device in zip(model.cut(points), self.devices, strict=True)]

    def step(self, images, labels):
        """Forward of all microbatches, then backward of all. See `Rung.step`."""
        images, labels = self.to_device(images, labels)
        outputs = self.forward(images)
        labels = labels.to(outputs.device)  # the loss is computed where the outputs are
        loss = loss_fn(outputs, labels)
        loss.backward()  # adds to parameter.grad, on one device after the other
        return loss.detach(), count_correct(outputs, labels)

    def forward(self, images):
        """At tick t stage s works on microbatch t - s; later stages first, since their input is ready."""
        parts = list(images.chunk(self.microbatches))
        for tick in range(len(parts) + len(self.stages) - 1):
            for s in reversed(range(len(self.stages))):
                if 0 <= tick - s < len(parts):
                    parts[tick - s] = self.stages[s](parts[tick - s].to(self.devices[s], non_blocking=True))
        return torch.cat(parts)


class PerDevice(Rung):
    """One process per device: each holds one stage or two, and a schedule says what it does next."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.owners = placement(settings.schedule, world.world_size, settings.stages_per_rank)  # the rank of each stage
        points = resolve_cut(model.names, settings.cut, len(self.owners))
        self.shapes = stage_shapes(model, points, settings)
        self.stages = [model.cut(points)[i].to(self.device) for i, rank in enumerate(self.owners) if rank == self.rank]
        self.has_input, self.has_output = self.rank == self.owners[0], self.rank == self.owners[-1]
        self.recorder = make_recorder(settings, world)
        stages, loss = pipeline_stages(self, loss_fn)
        self.schedule = SCHEDULE_CLASSES[settings.schedule](stages, n_microbatches=self.microbatches, loss_fn=loss)

    def step(self, images, labels):
        """Do this rank's part of the schedule. See `Rung.step`."""
        images, labels = self.to_device(images, labels)
        losses = []
        inputs = (images,) if self.has_input else ()
        targets = {"target": labels, "losses": losses} if self.has_output else {}
        outputs = self.schedule.step(*inputs, **targets)
        result = torch.stack(losses).mean() if self.has_output else None
        return (result.detach(), count_correct(outputs, labels)) if self.has_output else self.no_result()

    def forward(self, images):
        """See `Rung.forward`."""
        return walk(self.stages, self.owners, self.shapes, images)
