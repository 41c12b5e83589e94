"""Hybrid: several replicas of a cut model. Each is a pipeline; gradients are averaged across them, as in DDP.

    torchrun --standalone --nproc-per-node 4 -m mpdemo.rungs.hybrid --model transformer --replicas 2

The processes form a grid, replicas x stages. With --sharded those that hold the same stage also divide it among them,
by FSDP. Taught in notebooks/33_replicas.ipynb. Source: https://arxiv.org/abs/2104.04473.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

from mpdemo.run import Rung, main, score


def average(parameters, group):
    """Replace each gradient by its mean over a group; all of them travel in one message."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    message = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(message, group=group)
    message /= dist.get_world_size(group)
    for gradient, mean in zip(gradients, message.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def build(run):
    grid = (run.s.replicas, run.s.devices)
    mesh = init_device_mesh(run.device.type, grid, mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    same_stage = mesh.get_group("dp")
    local = run.local_stages(mesh.get_group("pp"))  # a pipeline over the processes of this replica
    for module in local.shardable() if run.s.sharded else []:  # every block, then every stage
        fully_shard(module, mesh=mesh["dp"])
    make = get_schedule_class(run.s.schedule)
    schedule = make(local.pipeline_stages(), run.s.microbatches, loss_fn=cross_entropy)
    optimizer = run.optimizer(local.model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        losses = []
        inputs = (images,) if local.first else ()
        targets = {"target": labels, "losses": losses} if local.last else {}
        outputs = schedule.step(*inputs, **targets)  # all forward and backward passes, in order
        if not run.s.sharded:  # FSDP has averaged them already
            average(local.model.parameters(), same_stage)
        optimizer.step()
        return score(torch.stack(losses).mean(), outputs, labels) if local.last else None

    share = {"replicas": run.s.replicas, "replica": replica, "group": same_stage}
    return Rung(local.model, optimizer, step, evaluate=local.forward, images=local.first, **share)


if __name__ == "__main__":
    main(__doc__, build)
