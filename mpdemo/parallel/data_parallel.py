"""Rung 2, data parallel in one process: the batch is scattered over copies of the model that threads drive.

With two GPUs or more this is ``torch.nn.DataParallel`` itself. It needs CUDA, so on a CPU the same four moves are
made here by hand: scatter, replicate, apply in threads, gather. PyTorch's operators release Python's global lock, so
two threads of one core each do overlap. Taught in notebooks/02_data_parallel.ipynb.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from mpdemo.parallel.rung import Rung, count_correct, local_devices, loss_fn


class DataParallel(Rung):
    """Copies of the model on several devices, one process; the gradients end up in the first copy."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.model = model.to(self.device)
        self.stages = [self.model]
        self.devices = local_devices(world, settings.devices)
        if self.device.type == "cuda":
            self.parallel = nn.DataParallel(self.model, self.devices)
        else:
            self.copies = [self.model] + [copy.deepcopy(self.model) for _ in self.devices[1:]]
            self.threads = ThreadPoolExecutor(len(self.copies), initializer=torch.set_num_threads, initargs=(1,))

    def step(self, images, labels):
        """Forward and backward of all parts at once. See `Rung.step`."""
        if self.device.type != "cuda":
            return self._step_by_hand(images, labels)
        labels = labels.to(self.device, non_blocking=True)
        outputs = self.parallel(images)  # scatters the images, gathers the outputs on the first device
        loss = loss_fn(outputs, labels)
        self.scaler.scale(loss).backward()  # sums the copies' gradients into the first
        return loss.detach(), count_correct(outputs, labels)

    def _step_by_hand(self, images, labels):
        """What nn.DataParallel does, move by move."""
        parts = zip(images.chunk(len(self.copies)), labels.chunk(len(self.copies)), strict=True)  # scatter
        replicate(self.model, self.copies[1:])
        work = [self.threads.submit(self._part, m, *part) for m, part in zip(self.copies, parts, strict=True)]
        losses, correct = zip(*(w.result() for w in work), strict=True)  # gather
        add_gradients(self.model, self.copies[1:])
        return sum(losses), sum(correct)

    def _part(self, model, images, labels):
        """One copy's forward and backward, in its own thread; the loss is this part's share of the batch's mean."""
        outputs = model(images)
        loss = loss_fn(outputs, labels) / len(self.copies)
        loss.backward()
        return loss.detach(), count_correct(outputs, labels)

    def forward(self, images):
        """See `Rung.forward`."""
        return self.model(images)


@torch.no_grad()
def replicate(model, copies):
    """Give every copy the model's present weights and buffers, and no gradients."""
    for other in copies:
        other.zero_grad(set_to_none=True)
        for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
            theirs.copy_(mine)


@torch.no_grad()
def add_gradients(model, copies):
    """Add the copies' gradients to the model's own."""
    for other in copies:
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad += theirs.grad
