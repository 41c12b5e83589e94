"""The question "which one?": a model, a batch, and the devices that are available; and one way to train that fits.

`mpdemo.plan.choose` asks its rules in order. Taught in notebooks/11_which_one.ipynb.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mpdemo.plan import cost
from mpdemo.plan.footprint import estimate, footprints
from mpdemo.plan.machine import Machine
from mpdemo.plan.subject import MIB, RESERVE, STATES, Subject, settled

LINKS = {True: 300e9, False: 25e9}  # bytes per second: NVLink of an A100 in one node; InfiniBand HDR between nodes
# An all-reduce is an all-gather and a reduce-scatter; a broadcast goes round the ring once.
HALVES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1}


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
        Whose data sheet the times are estimated from, as for `mpdemo.plan.footprint.estimate`.
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
    gpu: str = "a100"
    machine: Machine | None = None

    @property
    def subject(self):
        """The model and its data."""
        return Subject(self.model, self.image_size, self.classes, self.channels, self.norm)

    @property
    def limit(self):
        """Bytes of one device that PyTorch may use."""
        return self.memory - RESERVE

    @property
    def link(self):
        """Bytes per second between two devices: as measured, or of one node, or of the slower link between nodes."""
        return cost.bandwidth(self.machine.per_byte) if self.machine else LINKS[self.nodes == 1]

    def blocks(self):
        """Return the footprints of the model's blocks."""
        return footprints(**self.subject._asdict())

    def states(self):
        """Return the bytes of weights, gradients and optimizer states, which no smaller batch makes smaller."""
        return sum(b.weights + (1 + STATES[self.optimizer]) * b.gradients for b in self.blocks())

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
        return estimate(sizes=[size], gpu=self.gpu, **self.subject._asdict())[size]


@dataclass(frozen=True)
class Fit:
    """One way to train a case.

    Attributes
    ----------
    settings : dict
        Of ``python -m mpdemo train``, without the model and the data.
    memory : float
        Bytes on the fullest device.
    seconds : float or None
        Time of a step without messages, from the costs of the case; None where they do not say it.
    sent : float
        Bytes that this device sends in a step.
    """

    settings: dict
    memory: float
    seconds: float | None = None
    sent: float = 0.0


def on_one(case, images, parts, precision="fp32", checkpointing=False):
    """Return the `DeviceMemory` of one device that accumulates the gradients of `images` in so many parts."""
    from mpdemo.plan import memory

    rung = "ddp" if case.devices > 1 else "single"
    more = {"microbatches": parts, "precision": precision, "activation_checkpointing": checkpointing}
    s = settled(case.subject, rung, images * case.devices, case.devices, **more)
    return memory.processes(case.subject, s, STATES[case.optimizer])[0].devices[0]


def counted(case, rung, rank=0, devices=None, replicas=None, **settings):
    """Dry-run one rank of a rung: return its peak memory and the bytes that it sends."""
    from mpdemo.plan import memory

    s = settled(case.subject, rung, case.batch, devices or case.devices, replicas, **settings)
    states = STATES[case.optimizer]
    if rung in ("model_parallel", "pipeline", "hybrid"):
        found = memory.of_rank(case.subject, s, rank, states)
    else:
        found = memory.processes(case.subject, s, states)[0]
    return found.devices[0].peak, ring_bytes(found.messages, replicas or s.devices)


def ring_bytes(messages, ranks) -> float:
    """Return the bytes that each of `ranks` devices sends, with collectives that go round a ring.

    `messages` are those of `mpdemo.plan.memory.Counted`: the whole tensor that is reduced, or that all parts make.
    """
    share = (ranks - 1) / ranks
    return sum(HALVES[kind] * share * size if kind in HALVES else size for kind, size in messages.items())


def mib(number):
    """Return bytes as text, in MiB."""
    return f"{number / MIB:,.0f} MiB"
