"""What every rung offers to the training loop. A rung computes gradients; the loop owns data, optimizer and clock."""

from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy

from mpdemo.errors import UserError


def loss_fn(outputs, labels):
    """Cross entropy, averaged over the images: outputs (B, classes), labels (B,) -> scalar, in float32."""
    return cross_entropy(outputs.float(), labels)


def count_correct(outputs, labels):
    """How many images have their largest output at their label, as a scalar tensor on the device."""
    return (outputs.argmax(1) == labels).sum()


def local_devices(world, count) -> list[torch.device]:
    """The devices that one process drives: `count` GPUs from its own on, or `count` times the CPU."""
    if world.device.type != "cuda":
        return [world.device] * count
    first, visible = world.device.index, torch.cuda.device_count()
    if first + count > visible:
        raise UserError(f"{count} devices wanted from GPU {first} on, {visible} GPUs visible; lower --devices")
    return [torch.device("cuda", first + i) for i in range(count)]


class Rung:
    """The base of all rungs.

    Attributes
    ----------
    model : Blocks
        The whole model, in the rungs that do not cut it.
    stages : list of Blocks
        What this process holds of the model: one entry, unless it holds several stages of a cut model.
    devices : list of torch.device
        What this process drives; on a CPU as many entries as cores.
    replicas, replica : int
        How many copies of the model share the batch, and which of them this process belongs to.
    microbatches : int
        Parts into which the share of this replica is cut.
    has_input, has_output : bool
        Whether this process takes the images in, and whether it computes the loss.
    recorder : Recorder or None
        Records what this rank does when: per-device forms of a cut model, where the settings ask for it, or
        `mpdemo.timeline.observe`.
    """

    replicas, replica = 1, 0
    has_input = has_output = True
    recorder = None

    def __init__(self, world, settings):
        self.device, self.rank = world.device, world.rank
        self.devices = local_devices(world, settings.devices if settings.form == "one-process" else 1)
        self.microbatches = settings.microbatches
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.precision == "fp16")

    def step(self, images, labels):
        """Compute the gradients of one batch; leave them in ``parameter.grad``.

        Parameters
        ----------
        images : torch.Tensor
            (B, C, S, S): this replica's share of the global batch; (B, 0) where the process does not take images.
        labels : torch.Tensor
            (B,), whole numbers.

        Returns
        -------
        loss, correct : torch.Tensor
            Scalars on the device: mean loss and number of right answers of this share; zeros without the output.
        """
        raise NotImplementedError

    def forward(self, images):
        """Outputs (B, classes) of a batch, without training; None where this process does not have them."""
        return self.model(images)

    def to_device(self, *tensors):
        """Copy tensors to this process's device, without waiting for the copy."""
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def split(self, images, labels):
        """Return the microbatches of a batch, on the device: pairs (images, labels)."""
        return list(zip(*(tensor.chunk(self.microbatches) for tensor in self.to_device(images, labels)), strict=True))

    def no_sync(self):
        """A ``with`` block whose steps leave the replicas' gradients apart; a step after it averages all of them."""
        return nullcontext()

    def no_result(self):
        """Return the loss and the right answers of a process without the output: zeros."""
        return torch.zeros((), device=self.device), torch.zeros((), dtype=torch.long, device=self.device)

    def record(self, kind):
        """Record a ``with`` block as an operation `kind` of this rank's first stage, where a timeline is recorded."""
        return self.recorder.operation(kind, self.owners.index(self.rank)) if self.recorder else nullcontext()

    @torch.no_grad()
    def evaluate(self, images, labels):
        """Return the sum of the losses and the number of right answers of one validation batch."""
        images, labels = self.to_device(images, labels)
        outputs = self.forward(images)
        if not self.has_output:
            return self.no_result()
        labels = labels.to(outputs.device)
        return loss_fn(outputs, labels) * len(labels), count_correct(outputs, labels)

    def named_parameters(self) -> dict:
        """The parameters this process trains, under their names in the uncut model."""
        return {name: p for stage in self.stages for name, p in stage.named_parameters()}

    def weights(self) -> dict:
        """What this process holds of the model, parameters and buffers, under their names in the uncut model."""
        return {name: weight for stage in self.stages for name, weight in stage.state_dict().items()}

    @property
    def saves(self) -> bool:
        """Whether a checkpoint takes what this process holds; the other replicas hold the same."""
        return self.replica == 0

    def synchronise(self):
        """Make what the replicas keep apart (batch norm's statistics) equal, before it is used or saved."""

    def train(self, mode=True):
        """Switch between training and evaluation behaviour (batch norm)."""
        for stage in self.stages:
            stage.train(mode)
