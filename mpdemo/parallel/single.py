"""Rung 1, the reference: one process, one device. Every other rung must compute these gradients.

Taught in notebooks/01_single_device.ipynb.
"""

from mpdemo.parallel.rung import Rung, count_correct, loss_fn


class Single(Rung):
    """The whole model on one device."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.model = model.to(self.device)
        self.stages = [self.model]

    def step(self, images, labels):
        """Forward and backward of one microbatch after the other; gradients add up. See `Rung.step`."""
        total, correct = 0, 0
        for part, target in self.split(images, labels):
            outputs = self.model(part)
            loss = loss_fn(outputs, target) / self.microbatches  # the parts' sum is the mean
            self.scaler.scale(loss).backward()  # adds to parameter.grad
            total, correct = total + loss.detach(), correct + count_correct(outputs, target)
        return total, correct
