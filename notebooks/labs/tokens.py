"""The tokens of a sequence that ranks have split: all of them gathered, or the sum of each rank's own. (..., T, D)"""

import torch
import torch.distributed as dist


def all_gather(part):
    """Return the tokens of all ranks, which are the last dimension but one."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, -2)


def reduce_scatter(whole):
    """Return the sum over ranks of this rank's tokens."""
    parts = [part.contiguous() for part in whole.chunk(dist.get_world_size(), -2)]
    dist.reduce_scatter(own := torch.empty_like(parts[0]), parts)
    return own


class Gather(torch.autograd.Function):
    """Forward the tokens of all ranks; backward this rank's tokens of the gradients' sum."""

    @staticmethod
    def forward(ctx, part):
        return all_gather(part)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter(gradient)
