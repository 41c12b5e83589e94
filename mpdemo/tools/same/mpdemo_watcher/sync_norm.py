"""SyncBatchNorm on CPU processes, where PyTorch refuses it: the same statistics, by differentiable all-reduces."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

from . import private_torch
from .notes import ORDER, note_once


def watch():
    """Let it work where it would be refused."""
    if ORDER["device"] == "cpu" or not torch.cuda.is_available():
        private_torch.allow_sync_norm()
        nn.SyncBatchNorm.forward = forward


def forward(norm, x):
    """Normalize by mean and variance over the rows of all ranks; over this rank's, where the real one does."""
    several = dist.is_initialized() and dist.get_world_size(norm.process_group) > 1
    if not (norm.training and several) or "batchnorm" in ORDER["without"]:
        return nn.BatchNorm1d.forward(norm, x)
    note_once("emulated", "SyncBatchNorm")
    dims, shape = [k for k in range(x.dim()) if k != 1], [1, -1] + [1] * (x.dim() - 2)
    exact = x.double()  # the difference of two large numbers follows
    count = torch.full([1], x.numel() / x.shape[1], dtype=exact.dtype, device=x.device)
    group = norm.process_group or dist.group.WORLD
    sums = all_reduce(torch.cat([exact.sum(dims), exact.square().sum(dims), count]), group=group)
    total = float(sums[-1])
    mean, square = (sums[:-1] / total).chunk(2)
    variance = square - mean.square()
    if norm.track_running_stats:
        remember(norm, mean.detach(), variance.detach() * total / max(total - 1, 1))
    found = ((exact - mean.view(shape)) * (variance.view(shape) + norm.eps).rsqrt()).to(x.dtype)
    return found if norm.weight is None else found * norm.weight.view(shape) + norm.bias.view(shape)


@torch.no_grad()
def remember(norm, mean, variance):
    """Update the running statistics as the real one does."""
    norm.num_batches_tracked += 1
    share = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        running.lerp_(new.to(running.dtype), share)
