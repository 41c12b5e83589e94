"""Fully sharded data parallel: as DDP, but each process holds only its part of the model.

A block's weights are gathered from all processes (all-gather) just before it computes, and dropped after it. In the
backward pass they are gathered once more, and each process receives its part of the averaged gradients
(reduce-scatter), so its optimizer has states for that part alone. Taught in notebooks/07_sharding.ipynb. Sources:
https://arxiv.org/abs/1910.02054, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mpdemo.parallel.rung import Rung, count_correct, loss_fn


class FSDP(Rung):
    """A part of every parameter in every process; a block is whole only while it computes."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.model = model  # goes to the device block by block, so that the device never holds it whole
        self.stages = [self.model]
        self.replicas, self.replica = world.world_size, world.rank
        mesh = init_device_mesh(self.device.type, (world.world_size,), mesh_dim_names=("dp",))
        shard(self.model, mesh, settings.reshard)
        self.sharded = dict(self.model.named_parameters())  # with --reshard never the model has whole ones in between

    def step(self, images, labels):
        """Forward and backward of this process's share; its part of the averaged gradients remains. See `Rung.step`."""
        total, correct = 0, 0
        *earlier, last = self.split(images, labels)
        for part, target in (*earlier, last):
            self.model.set_requires_gradient_sync(part is last[0])  # one reduce-scatter, after the last part
            outputs = self.model(part)  # gathers one block's weights after the other
            loss = loss_fn(outputs, target) / self.microbatches  # the parts' sum is the mean
            self.scaler.scale(loss).backward()  # gathers again, and reduce-scatters the gradients while it computes
            total, correct = total + loss.detach(), correct + count_correct(outputs, target)
        return total, correct

    def named_parameters(self):
        """This process's part of every parameter. See `Rung.named_parameters`."""
        return self.sharded

    def synchronise(self):
        """Give every process rank 0's buffers. See `Rung.synchronise`."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)


def shard(model, mesh, reshard):
    """Divide every parameter of a model over a mesh, block by block: what is one block is gathered in one message.

    Parameters
    ----------
    model : Blocks
    mesh : DeviceMesh
        One-dimensional.
    reshard : str
        "always": a block's weights are dropped after its forward pass. "never": they are kept for its backward pass,
        which saves one all-gather and costs the memory of the whole model.
    """
    for name in model.names:
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=reshard == "always")
    fully_shard(model, mesh=mesh)  # the root: it starts and ends every pass
