"""What ``nn.DataParallel`` does, move by move, on CPU cores: scatter, replicate, apply in threads, gather, add up.

PyTorch's operators release the GIL, so two threads of one core each compute at the same time.
Taught in notebooks/02_data_parallel.ipynb.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


class ThreadedDataParallel(nn.Module):
    """A stand-in for ``nn.DataParallel``: one copy of the model and one thread per CPU core.

    Parameters
    ----------
    model : nn.Module
        The first copy; the gradients end up in its parameters.
    devices : list of torch.device
        One entry per copy; only their number counts.
    """

    def __init__(self, model, devices):
        super().__init__()
        self.copies = [model, *(copy.deepcopy(model) for _ in devices[1:])]
        self.threads = ThreadPoolExecutor(len(devices), initializer=torch.set_num_threads, initargs=(1,))

    def forward(self, images):
        """Outputs (B, classes) of images (B, C, S, S), in order; B is a multiple of the number of copies."""
        return ScatterApplyGather.apply(self, images, *self.copies[0].parameters())


class ScatterApplyGather(torch.autograd.Function):
    """Forward and backward over all copies, as one operation of autograd."""

    @staticmethod
    def forward(ctx, replicas, images, *parameters):
        """Scatter, replicate, apply, gather. Each thread builds the graph of its own copy."""
        replicate(*replicas.copies)
        parts = images.chunk(len(replicas.copies))
        ctx.replicas, ctx.outputs = replicas, list(replicas.threads.map(apply, replicas.copies, parts))
        return torch.cat([outputs.detach() for outputs in ctx.outputs])

    @staticmethod
    def backward(ctx, gradient):
        """Backward of every copy in its thread, from its part of the outputs' gradient (B, classes)."""
        replicas, parts = ctx.replicas, gradient.chunk(len(ctx.outputs))
        computed = replicas.threads.map(gradients, replicas.copies, ctx.outputs, parts)
        return None, None, *add_gradients(computed)


def apply(model, images):
    """Run one copy on its part of the batch."""
    return model(images)


def gradients(model, outputs, gradient):
    """Return the gradients of one copy's parameters, in order."""
    return torch.autograd.grad(outputs, list(model.parameters()), gradient)


@torch.no_grad()
def replicate(model, *copies):
    """Give every copy the model's present weights and buffers."""
    for other in copies:
        for target, source in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
            target.copy_(source)


def add_gradients(gradients_of_copies):
    """Add up the copies' gradients, parameter by parameter; the first device gets the sums."""
    return [sum(gradients_of_one) for gradients_of_one in zip(*gradients_of_copies, strict=True)]
