"""Rung 5, pipelined model parallelism: the batch is cut into microbatches, so that the stages work at the same time.

Against the rung below: more microbatches, and a schedule that says in which order a device works on them.
Two forms, as there. Taught in notebooks/05_pipeline.ipynb. Sources: GPipe https://arxiv.org/abs/1811.06965,
1F1B https://arxiv.org/abs/1806.03377, interleaved https://arxiv.org/abs/2104.04473, zero bubble
https://arxiv.org/abs/2401.10241, ZBV https://arxiv.org/abs/2405.15362.
"""

import torch
from torch.distributed.pipelining import PipelineStage, schedules

from mpdemo.models import resolve_cut
from mpdemo.parallel.rung import Rung, count_correct, local_devices, loss_fn
from mpdemo.parallel.stages import quiet_greeting, recorder_for, stage_examples, walk
from mpdemo.plan import SCHEDULES, placement


class OneProcess(Rung):
    """One process drives all devices. Overlap comes from GPU kernels that return at once; a CPU has none."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.devices = local_devices(world, settings.devices)
        self.microbatches = settings.microbatches
        points = resolve_cut(model.names, settings.cut, len(self.devices))
        self.stages = [stage.to(device) for stage, device in zip(model.cut(points), self.devices, strict=True)]

    def step(self, images, labels):
        """Forward of all microbatches, then backward of all. See `Rung.step`."""
        outputs = self.forward(images)
        labels = labels.to(outputs.device, non_blocking=True)  # the loss is computed where the outputs are
        loss = loss_fn(outputs, labels)
        loss.backward()  # walks back over the devices by itself
        return loss.detach().to(self.device), count_correct(outputs, labels).to(self.device)

    def forward(self, images):
        """At tick t stage s works on microbatch t - s; later stages first, since their input is ready."""
        held = list(images.chunk(self.microbatches))
        for tick in range(len(held) + len(self.stages) - 1):
            for s in reversed(range(len(self.stages))):
                if 0 <= tick - s < len(held):
                    held[tick - s] = self.stages[s](held[tick - s].to(self.devices[s], non_blocking=True))
        return torch.cat(held)


class PerDevice(Rung):
    """One process a device: each holds one stage or two, and a schedule says what it does next."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        count = world.world_size * settings.stages_per_rank
        points = resolve_cut(model.names, settings.cut, count)
        self.owners = placement(settings.schedule, world.world_size, settings.stages_per_rank)  # the rank of each stage
        self.examples = stage_examples(model, points, settings)
        mine = [index for index, owner in enumerate(self.owners) if owner == world.rank]
        self.stages = [model.cut(points)[index].to(self.device) for index in mine]
        self.pipeline_stages = [
            PipelineStage(stage, index, count, self.device, *self.examples[index])
            for stage, index in zip(self.stages, mine, strict=True)
        ]
        quiet_greeting(self.pipeline_stages, self.device)
        self.recorder = recorder_for(settings, world, self.pipeline_stages)
        loss = self.recorder.loss(loss_fn) if self.recorder else loss_fn
        self.has_input, self.has_output = 0 in mine, count - 1 in mine
        held = self.pipeline_stages if len(mine) > 1 else self.pipeline_stages[0]
        schedule = getattr(schedules, SCHEDULES[settings.schedule].library_class)
        self.schedule = schedule(held, n_microbatches=settings.microbatches, loss_fn=loss)

    def step(self, images, labels):
        """This rank's part of the schedule. See `Rung.step`."""
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
