"""Rung 5, pipelined model parallelism: the batch is cut into microbatches, so that the stages work at the same time.

Against the rung below: more microbatches, and a schedule that says in which order a device works on them.
Two forms, as there. Taught in notebooks/05_pipeline.ipynb. Sources: GPipe https://arxiv.org/abs/1811.06965,
1F1B https://arxiv.org/abs/1806.03377, interleaved https://arxiv.org/abs/2104.04473, zero bubble and ZBV
https://arxiv.org/abs/2401.10241.
"""

import torch

from mpdemo.parallel.one_process import CutOverDevices
from mpdemo.parallel.per_device import SCHEDULE_CLASSES, CutOverProcesses, pipeline_stages
from mpdemo.parallel.rung import count_correct, loss_fn
from mpdemo.schedules import placement


class OneProcess(CutOverDevices):
    """One process drives all devices. Overlap comes from GPU kernels that return at once; a CPU has none."""

    def forward(self, images):
        """At tick t stage s works on microbatch t - s; later stages first, since their input is ready."""
        parts = list(images.chunk(self.microbatches))
        for tick in range(len(parts) + len(self.stages) - 1):
            for s in reversed(range(len(self.stages))):
                if 0 <= tick - s < len(parts):
                    parts[tick - s] = self.stages[s](parts[tick - s].to(self.devices[s], non_blocking=True))
        return torch.cat(parts)


class PerDevice(CutOverProcesses):
    """One process per device: each holds one stage or two, and a schedule says what it does next."""

    def __init__(self, model, world, settings):
        owners = placement(settings.schedule, settings.devices, settings.stages_per_rank)
        super().__init__(model, world, settings, owners)
        stages, loss = pipeline_stages(self, loss_fn)
        self.schedule = SCHEDULE_CLASSES[settings.schedule](stages, self.microbatches, loss_fn=loss)

    def step(self, images, labels):
        """Do this rank's part of the schedule. See `Rung.step`."""
        images, labels = self.to_device(images, labels)
        losses = []
        inputs = (images,) if self.has_input else ()
        targets = {"target": labels, "losses": losses} if self.has_output else {}
        outputs = self.schedule.step(*inputs, **targets)
        result = torch.stack(losses).mean() if self.has_output else None
        return (result.detach(), count_correct(outputs, labels)) if self.has_output else self.no_result()
