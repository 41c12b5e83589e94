"""The question "which one?": a model, a batch, and the devices that are at hand.

`mpdemo.plan.fit` says in which ways it fits, `mpdemo.plan.choose` which of them to take.
Taught in notebooks/11_which_one.ipynb.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mpdemo.plan import cost
from mpdemo.plan.footprint import footprints
from mpdemo.plan.machine import Machine
from mpdemo.plan.memory import RESERVE
from mpdemo.plan.roofline import estimate

LINKS = {True: 150e9, False: 12.5e9}  # bytes per second: NVLink of a V100 in one node; InfiniBand EDR between nodes


@dataclass(frozen=True)
class Case:
    """What is to be trained, and on what.

    Attributes
    ----------
    model : str or callable
        One of ``mpdemo.settings.MODELS``, or a function without arguments that returns `mpdemo.models.Blocks`.
    batch : int
        Images of a whole step, over all devices together.
    devices, nodes : int
        How many there are, in how many machines.
    memory : float
        Bytes of one device; `RESERVE` of them are kept for CUDA.
    optimizer : str
        "sgd", "momentum" or "adamw".
    gpu : str
        Whose data sheet the times are estimated from, as for `mpdemo.plan.roofline.estimate`.
    machine : Machine, optional
        What was measured on this machine's devices; times are then theirs, and none is of a data sheet.
    """

    model: str | Callable
    batch: int
    devices: int = 1
    nodes: int = 1
    memory: float = 16 * 2**30
    optimizer: str = "adamw"
    image_size: int = 224
    classes: int = 1000
    channels: int = 3
    norm: str = "batch"
    gpu: str = "v100"
    machine: Machine | None = None

    @property
    def limit(self):
        """Bytes of one device that PyTorch may use."""
        return self.memory - RESERVE

    @property
    def link(self):
        """Bytes per second between two devices: as measured, or of one node, or of the slower link between nodes."""
        if self.machine:
            return cost.bandwidth(self.machine.per_byte)
        return LINKS[self.nodes == 1]

    @property
    def data(self):
        """What a model is built for."""
        return {"classes": self.classes, "channels": self.channels, "norm": self.norm}

    def blocks(self, precision="fp32", checkpointing=False):
        """Return the footprints of the model's blocks, computed in "fp32" or "bf16", perhaps each block twice."""
        options = {"precision": precision, "checkpointing": checkpointing}
        return footprints(self.model, self.image_size, **self.data, **options)

    @property
    def update_per_byte(self):
        """Seconds of the optimizer's step for each byte of weights, measured; else 0."""
        return self.machine.update if self.machine else 0.0

    def update(self, shares=1):
        """Return the seconds of the optimizer's step on one of so many shares of the weights."""
        return self.update_per_byte * sum(block.weights for block in self.blocks()) / shares

    @property
    def one_device_seconds(self):
        """Seconds of a step on one device that had room for the whole batch."""
        return cost.total(self.costs(self.batch)) + self.update()

    def costs(self, size):
        """Return the costs of the blocks for `size` images, in float32, measured or estimated."""
        if self.machine:
            return cost.at(self.machine.costs, size)
        return estimate(self.model, [size], self.image_size, self.gpu, **self.data)[size]
