"""What the one-process forms of a cut model share: the stages on their devices, and a step that asks for the loss.

The rungs' files add the forward pass, which is where naive and pipelined differ.
Taught in notebooks/04_model_parallel.ipynb and 05_pipeline.ipynb.
"""

from mpdemo.models import resolve_cut
from mpdemo.parallel.rung import Rung, count_correct, loss_fn


class CutOverDevices(Rung):
    """One process drives all devices, each of which holds one stage."""

    def __init__(self, model, world, settings):
        super().__init__(world, settings)
        points = resolve_cut(model.names, settings.cut, len(self.devices))
        self.stages = [stage.to(device) for stage, device in zip(model.cut(points), self.devices, strict=True)]
        self.parallel = self.forward  # with several replicas: wrapped in DDP

    def step(self, images, labels):
        """Forward through all stages, backward through all. See `Rung.step`."""
        images, labels = self.to_device(images, labels)
        outputs = self.parallel(images)
        labels = labels.to(outputs.device)  # the loss is computed where the outputs are
        loss = loss_fn(outputs, labels)
        loss.backward()  # adds to parameter.grad, on one device after the other
        return loss.detach(), count_correct(outputs, labels)
