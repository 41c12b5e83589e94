"""Rung 1, the reference: one process, one device. Every other rung must compute these gradients.

Taught in notebooks/01_single_device.ipynb.
"""

from mpdemo.parallel.rung import Rung, count_correct, loss_fn


class Single(Rung):
    """The whole model on one device. With ``microbatches`` above 1 the gradients of the parts are accumulated."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        self.model = model.to(self.device)
        self.stages = [self.model]
        self.microbatches = settings.microbatches

    def step(self, images, labels):
        """Forward and backward, a microbatch at a time. See `Rung.step`."""
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        total, correct = 0, 0
        for part, target in zip(images.chunk(self.microbatches), labels.chunk(self.microbatches), strict=True):
            outputs = self.model(part)
            loss = loss_fn(outputs, target) / self.microbatches  # the mean of the parts' means is the batch's mean
            self.scaler.scale(loss).backward()  # adds to parameter.grad
            total, correct = total + loss.detach(), correct + count_correct(outputs, target)
        return total, correct

    def forward(self, images):
        """See `Rung.forward`."""
        return self.model(images)
