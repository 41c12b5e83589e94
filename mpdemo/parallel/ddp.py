"""Rung 3, distributed data parallel: one process per device, each with the whole model and its share of the batch.

In the backward pass the gradients are averaged over all processes (all-reduce), bucket by bucket, while earlier
layers still compute. Taught in notebooks/03_ddp.ipynb. Sources: https://arxiv.org/abs/2006.15704,
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
"""

from contextlib import nullcontext

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpdemo.parallel.rung import Rung, count_correct, loss_fn


class DDP(Rung):
    """A replica of the model in every process; equal weights everywhere, because equal gradients everywhere."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.model = model.to(self.device)
        self.stages = [self.model]
        self.replicas, self.replica = world.world_size, world.rank
        static = self.microbatches == 1  # every backward pass ends with an all-reduce
        self.parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True, static_graph=static)

    def step(self, images, labels):
        """Forward and backward of this process's share; the gradients come out averaged. See `Rung.step`."""
        total, correct = 0, 0
        *earlier, last = self.split(images, labels)
        for part, target in (*earlier, last):
            with nullcontext() if part is last[0] else self.parallel.no_sync():  # one all-reduce, after the last part
                outputs = self.parallel(part)
                loss = loss_fn(outputs, target) / self.microbatches  # the parts' sum is the mean
                self.scaler.scale(loss).backward()  # adds to parameter.grad, and all-reduces while it computes
            total, correct = total + loss.detach(), correct + count_correct(outputs, target)
        return total, correct

    def synchronise(self):
        """Give every process rank 0's buffers, as the next training step would."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
