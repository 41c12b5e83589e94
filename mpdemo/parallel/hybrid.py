"""Rung 6, hybrid: several replicas of a cut model. Each is a pipeline; gradients are averaged across them, as in DDP.

Against the rung below: the devices form a grid, replicas x stages. A step works on a share of the batch inside each
replica, and ends with an all-reduce among the devices that hold the same stage. Two forms, as there. With --sharded
these devices also divide the stage among them, by FSDP. Taught in notebooks/06_hybrid.ipynb. Sources:
https://arxiv.org/abs/2104.04473 (pipelines side by side),
https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html.
"""

from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mpdemo.parallel import pipeline
from mpdemo.parallel.fsdp import shard
from mpdemo.parallel.per_device import average_gradients


class OneProcess(pipeline.OneProcess):
    """One process per replica drives all devices of its replica; DDP averages over the processes."""

    def __init__(self, model, world, settings):
        super().__init__(model, world, settings)
        self.replicas, self.replica = settings.replicas, world.rank
        replica = nn.ModuleList(self.stages)
        replica.forward = self.forward
        static = settings.accumulate == 1  # as in DDP: every backward pass ends with an all-reduce
        self.parallel = DistributedDataParallel(replica, gradient_as_bucket_view=True, static_graph=static)

    def no_sync(self):
        """See `Rung.no_sync`."""
        return self.parallel.no_sync()

    def synchronise(self):
        """Give every replica the first one's buffers. See `Rung.synchronise`."""
        for buffer in self.parallel.buffers():
            dist.broadcast(buffer, 0)


class PerDevice(pipeline.PerDevice):
    """One process per device: row r of the grid is replica r, column s are the ranks that hold stage s."""

    def __init__(self, model, world, settings):
        names = tuple(settings.mesh.split("-"))  # neighbouring ranks differ in the last one
        sizes = {"dp": settings.replicas, "pp": settings.devices}
        shape = tuple(sizes[name] for name in names)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
        self.group, self.same_stage = mesh.get_group("pp"), mesh.get_group("dp")
        super().__init__(model, world, settings)  # a pipeline over the processes of its group
        self.replicas, self.replica = settings.replicas, mesh.get_local_rank("dp")
        self.averages = not settings.sharded  # FSDP averages what it divides
        for stage in self.stages if settings.sharded else []:
            shard(stage, mesh["dp"], settings.reshard)

    def step(self, images, labels):
        """Do a step of this replica's pipeline, then average over the replicas. See `Rung.step`."""
        result = super().step(images, labels)
        if self.averages:
            with self.record("A"):
                average_gradients(self.named_parameters().values(), self.same_stage)
        return result

    @contextmanager
    def no_sync(self):
        """See `Rung.no_sync`. A mean of sums is the sum of the means, so averaging later is the same.

        Sharded replicas average in every step: a device has no room for whole gradients between two.
        """
        averages, self.averages = self.averages, False
        yield
        self.averages = averages

    def synchronise(self):
        """Give every replica the first one's buffers. See `Rung.synchronise`."""
        for buffer in (buffer for stage in self.stages for buffer in stage.buffers()):
            dist.broadcast(buffer, group=self.same_stage, group_src=0)
