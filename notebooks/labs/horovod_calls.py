"""Horovod's calls, each in a few lines of `torch.distributed`, and a small run written with them.

    torchrun --standalone --nproc-per-node 2 -m mpdemo.labs.horovod_calls runs/12_horovod

In one process it is the same training: rank r of n takes images r, r + n, ... of every batch. `train` is written as a
program for Horovod and takes its calls from here; ``hvd.init()`` is `join_world`. Taught in
notebooks/12_other_tools.ipynb. Source: https://horovod.readthedocs.io/en/stable/pytorch.html.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from mpdemo import data, models
from mpdemo.training.log import RunLog
from mpdemo.trial import join_world
from mpdemo.world.launch import end

BATCH, STEPS = 64, 12  # images over all processes together


def rank() -> int:
    """Return this process's number, from 0 on."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def allreduce(tensor):
    """Return the *average* over all processes in a new tensor; `dist.all_reduce` sums, and writes into the old one."""
    result = tensor.clone()
    if size() > 1:
        dist.all_reduce(result)
    return result / size()


def allgather(tensor):
    """Return the tensors of all processes, one behind the other along their first dimension."""
    if size() == 1:
        return tensor.clone()
    parts = [torch.empty_like(tensor) for _ in range(size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def broadcast_parameters(state, root_rank):
    """Give every process the tensors of one of them."""
    for tensor in state.values():
        if size() > 1:
            dist.broadcast(tensor, root_rank)


def DistributedOptimizer(optimizer, named_parameters):  # noqa: N802
    """Return the optimizer; from now on each gradient is averaged as soon as it is there, and `step` waits for all."""
    waiting = []

    def start(parameter):  # during the backward pass
        if size() > 1:
            parameter.grad /= size()
            waiting.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(*_):
        while waiting:
            waiting.pop().wait()

    for _, parameter in named_parameters:
        parameter.register_post_accumulate_grad_hook(start)
    optimizer.register_step_pre_hook(finish)
    return optimizer


def train(hvd, images, labels, steps) -> list[float]:
    """Train as a program for Horovod does; return the loss of every step, over all processes."""
    torch.manual_seed(hvd.rank())  # the weights differ until they are broadcast
    model = models.build("toy", seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    losses = []
    for step in range(steps):
        share = slice(step * BATCH + hvd.rank(), (step + 1) * BATCH, hvd.size())
        optimizer.zero_grad()
        loss = cross_entropy(model(images[share]), labels[share])
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
    return losses


def main(out, steps=STEPS):
    """Train in every process; rank 0 writes ``metrics.jsonl`` and ``summary.json``."""
    with join_world() as world:  # hvd.init(): torch.distributed.init_process_group
        images, labels = data.load("digits").train.tensors
        losses = train(sys.modules[__name__], images, labels, int(steps))
        ranks = allgather(torch.tensor([rank()])).tolist()
    log = RunLog(out, world.rank == 0)
    for step, loss in enumerate(losses, 1):
        log.write("step", step=step, loss=loss)
    log.finish({"ranks": ranks})


if __name__ == "__main__":
    end(main(*sys.argv[1:]))
