"""What every rung offers to the training loop. A rung computes gradients; the loop owns data, optimizer and clock."""

import torch
from torch.nn.functional import cross_entropy


def loss_fn(outputs, labels):
    """Cross entropy, averaged over the images: outputs (B, classes), labels (B,) -> scalar, in float32."""
    return cross_entropy(outputs.float(), labels)


def count_correct(outputs, labels):
    """How many images have their largest output at their label, as a scalar tensor on the device."""
    return (outputs.argmax(1) == labels).sum()


def local_devices(world, count) -> list[torch.device]:
    """The devices that one process drives: GPUs from its own on, or `count` times the CPU."""
    if world.device.type != "cuda":
        return [world.device] * count
    from mpdemo.errors import UserError

    first, visible = world.device.index, torch.cuda.device_count()
    if first + count > visible:
        raise UserError(f"{count} devices wanted from GPU {first} on, {visible} GPUs visible; lower --devices")
    return [torch.device("cuda", first + i) for i in range(count)]


class Rung:
    """The base of all rungs.

    Attributes
    ----------
    stages : list of Blocks
        What this process holds of the model: one entry, unless the model is cut.
    replicas, replica : int
        How many copies of the model share the batch, and which of them this process belongs to.
    has_input, has_output : bool
        Whether this process takes the images in, and whether it computes the loss.
    recorder : Recorder or None
        Notes what this rank does when (process-a-device forms of a cut model, where the settings ask for it).
    """

    replicas, replica = 1, 0
    has_input = has_output = True
    recorder = None

    def __init__(self, world, settings):
        self.device = world.device
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
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, images, labels):
        """Return the sum of the losses and the number of right answers of one validation batch."""
        outputs = self.forward(images.to(self.device, non_blocking=True))
        if not self.has_output:
            return torch.zeros((), device=self.device), torch.zeros((), dtype=torch.long, device=self.device)
        labels = labels.to(outputs.device, non_blocking=True)
        return loss_fn(outputs, labels) * len(labels), count_correct(outputs, labels)

    def named_parameters(self) -> dict:
        """The parameters this process trains, under their names in the uncut model."""
        return {name: p for stage in self.stages for name, p in stage.named_parameters()}

    def synchronise(self):
        """Make what the replicas keep apart (batch norm's statistics) equal, before it is used or saved."""

    def train(self, mode=True):
        """Switch between training and evaluation behaviour (batch norm)."""
        for stage in self.stages:
            stage.train(mode)
