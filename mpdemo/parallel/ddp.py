"""Rung 3, distributed data parallel: one process a device, each with the whole model and its share of the batch.

In the backward pass the gradients are averaged over all processes (all-reduce), bucket by bucket, while earlier
layers still compute. Taught in notebooks/03_ddp.ipynb. Sources: https://arxiv.org/abs/2006.15704,
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
"""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpdemo.parallel.rung import Rung, count_correct, loss_fn


class DDP(Rung):
    """A replica of the model in every process; equal weights everywhere, because equal gradients everywhere."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.replicas, self.replica = world.world_size, world.rank
        self.model = model.to(self.device)
        self.stages = [self.model]
        self.parallel = DistributedDataParallel(
            self.model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # the gradients live in the buckets: no copy before the all-reduce
            static_graph=True,  # every step uses the same parameters in the same order
        )

    def step(self, images, labels):
        """Forward and backward of this process's share; the gradients come out averaged. See `Rung.step`."""
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        outputs = self.parallel(images)
        loss = loss_fn(outputs, labels)
        self.scaler.scale(loss).backward()  # all-reduces while it computes
        return loss.detach(), count_correct(outputs, labels)

    def forward(self, images):
        """See `Rung.forward`."""
        return self.model(images)

    def synchronise(self):
        """Give every process rank 0's buffers, as the next training step would."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
