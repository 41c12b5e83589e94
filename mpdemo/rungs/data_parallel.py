"""Data parallel in one process: the batch is scattered over copies of the model, each driven by a thread.

    python -m mpdemo.rungs.data_parallel --model convnet --devices 2

With GPUs this is ``nn.DataParallel`` itself. It needs CUDA, so on CPU cores the same moves are made by hand. Taught in
notebooks/13_data_parallel.ipynb.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mpdemo.run import Rung, main, score


class ThreadedDataParallel(nn.Module):
    """What ``nn.DataParallel`` does, with one copy of the model and one thread per CPU core."""

    def __init__(self, model, devices):
        super().__init__()
        self.copies = [model, *(copy.deepcopy(model) for _ in devices[1:])]  # gradients go to the first
        self.threads = ThreadPoolExecutor(len(devices), None, torch.set_num_threads, (1,))

    def forward(self, images):
        return ScatterApplyGather.apply(self, images, *self.copies[0].parameters())


class ScatterApplyGather(torch.autograd.Function):
    """Forward and backward over all copies, as one operation of autograd."""

    @staticmethod
    def forward(ctx, model, images, *parameters):
        for other in model.copies[1:]:  # replicate
            other.load_state_dict(model.copies[0].state_dict())
        parts = images.chunk(len(model.copies))  # scatter
        ctx.model = model
        ctx.outputs = list(model.threads.map(forward, model.copies, parts))
        return torch.cat([outputs.detach() for outputs in ctx.outputs])  # gather

    @staticmethod
    def backward(ctx, gradient):
        parts = gradient.chunk(len(ctx.outputs))
        of_copies = ctx.model.threads.map(gradients, ctx.model.copies, ctx.outputs, parts)
        return None, None, *(sum(of_one) for of_one in zip(*of_copies, strict=True))


def forward(model, images):
    return model(images)


def gradients(model, outputs, gradient):
    return torch.autograd.grad(outputs, list(model.parameters()), gradient)


def build(run):
    model = run.model().to(run.device)
    wrapper = nn.DataParallel if run.device.type == "cuda" else ThreadedDataParallel
    parallel = wrapper(model, run.devices)
    optimizer = run.optimizer(model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        parts = run.split(images, labels)  # one part, unless --microbatches asks for more
        total = 0
        for part, target in parts:
            outputs = parallel(part)  # scatters the images, gathers the outputs on the first device
            loss = cross_entropy(outputs, target) / len(parts)  # the parts' losses add up to the mean
            loss.backward()  # sums the copies' gradients into parameter.grad
            total += score(loss, outputs, target)
        optimizer.step()
        return total

    return Rung(model, optimizer, step)


if __name__ == "__main__":
    main(__doc__, build)
