"""Rung 2, data parallel in one process: the batch is scattered over copies of the model that threads drive.

With GPUs this is ``torch.nn.DataParallel`` itself. It needs CUDA, so CPU cores get the same moves made by hand
(threads.py). Taught in notebooks/02_data_parallel.ipynb.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html.
"""

from torch import nn

from mpdemo.parallel.rung import Rung, count_correct, local_devices, loss_fn
from mpdemo.parallel.threads import ThreadedDataParallel


class DataParallel(Rung):
    """Copies of the model on several devices, one process; the gradients end up in the first copy."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.model = model.to(self.device)
        self.stages = [self.model]
        wrapper = nn.DataParallel if self.device.type == "cuda" else ThreadedDataParallel
        self.parallel = wrapper(self.model, local_devices(world, settings.devices))

    def step(self, images, labels):
        """Forward and backward of one microbatch after the other, on all devices at once. See `Rung.step`."""
        total, correct = 0, 0
        for part, target in self.split(images, labels):
            outputs = self.parallel(part)  # scatters the images, gathers the outputs on the first device
            loss = loss_fn(outputs, target) / self.microbatches  # the parts' sum is the mean
            self.scaler.scale(loss).backward()  # sums the copies' gradients into parameter.grad
            total, correct = total + loss.detach(), correct + count_correct(outputs, target)
        return total, correct
