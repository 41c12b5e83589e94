"""Hybrid: several replicas of a cut model. Each is a pipeline; gradients are averaged across them, as in DDP.

    torchrun --standalone --nproc-per-node 4 -m mpdemo.rungs.hybrid --model transformer --replicas 2

The processes form a grid, replicas x stages. With --sharded those that hold the same stage also divide it among them,
by FSDP. Taught in notebooks/06_hybrid.ipynb. Source: https://arxiv.org/abs/2104.04473.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

from mpdemo.run import Run, Rung, score


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
    replica, same_stage = mesh.get_local_rank("dp"), mesh.get_group("dp")
    part = run.part(mesh.get_group("pp"))  # a pipeline over the processes of this replica
    for module in part.shardable() if run.s.sharded else []:  # every block, then every stage
        fully_shard(module, mesh=mesh["dp"], mp_policy=run.policy())
    make = get_schedule_class(run.s.schedule)
    schedule = make(part.pipeline_stages(), run.s.microbatches, loss_fn=cross_entropy)
    optimizer = run.optimizer(part.model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        losses = []
        inputs = (images,) if part.first else ()
        targets = {"target": labels, "losses": losses} if part.last else {}
        outputs = schedule.step(*inputs, **targets)  # all forward and backward passes, in order
        if not run.s.sharded:  # FSDP has averaged them already
            average(part.model.parameters(), same_stage)
        optimizer.step()
        return score(torch.stack(losses).mean(), outputs, labels) if part.last else None

    share = {"replicas": run.s.replicas, "replica": replica, "group": same_stage}
    return Rung(part.model, optimizer, step, evaluate=part.forward, images=part.first, **share)


if __name__ == "__main__":
    Run.main(__doc__, build)
