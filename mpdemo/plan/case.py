"""The question "which one?": a model, a batch, and the devices that are available; and one way to train that fits.

`mpdemo.plan.choose` asks its rules in order. Taught in notebooks/11_which_one.ipynb.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mpdemo.plan.footprint import costs, footprints
from mpdemo.plan.subject import MIB, RESERVE, STATES, Subject, settled
from mpdemo.rules import CUT_RUNGS

LINKS = {True: 300e9, False: 25e9}  # bytes per second: NVLink of an A100 in one node; InfiniBand HDR between nodes
# An all-reduce is an all-gather and a reduce-scatter; a broadcast goes round the ring once.
HALVES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1}


@dataclass(frozen=True)
class Case:
    """What is to be trained, and on what.

    Attributes
    ----------
    model : str, callable or OwnModel
        One of ``mpdemo.settings.MODELS``, a function without arguments that returns `mpdemo.models.Blocks`, or a
        `mpdemo.models.own.OwnModel`, which no strategy splits.
    batch : int
        Images of a whole step, over all devices together.
    devices, nodes : int
        How many there are, in how many machines.
    memory : float
        Bytes of one device; `RESERVE` of them are kept for CUDA.
    optimizer : str
        "sgd", "momentum" or "adamw".
    gpu : str
        Whose data sheet the times are estimated from: "v100", "a100" or "h100". An A100 of 40 GiB by default.
    """

    model: str | Callable
    batch: int
    devices: int = 1
    nodes: int = 1
    memory: float = 40 * 2**30
    optimizer: str = "adamw"
    image_size: int = 224
    classes: int = 1000
    channels: int = 3
    norm: str = "batch"
    gpu: str = "a100"

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
        """Bytes per second between two devices: of one node, or of the slower link between nodes."""
        return LINKS[self.nodes == 1]

    def blocks(self):
        """Return the footprints of the model's blocks."""
        return footprints(self.subject)

    def states(self):
        """Return the bytes of weights, gradients and optimizer states, which no smaller batch makes smaller."""
        return sum(b.weights + (1 + STATES[self.optimizer]) * b.gradients for b in self.blocks())

    @property
    def one_device_seconds(self):
        """Seconds of a step on one device that had room for the whole batch."""
        return sum(cost.both for cost in self.costs(self.batch))

    def costs(self, size, precision="fp32"):
        """Return the estimated costs of the blocks for `size` images; [] where no data sheet says them."""
        return costs(self.subject, size, self.gpu, precision)


class Fit(NamedTuple):
    """One way to train a case."""

    settings: dict  # of ``python -m mpdemo train``, without the model and the data
    memory: float  # bytes on the fullest device
    seconds: float | None = None  # of a step without messages; None where no data sheet says it
    sent: float = 0.0  # bytes that this device sends in a step
    stages: tuple = ()  # of a pipeline: bytes on each device, in order


def on_one(case, images, parts, precision="fp32", checkpointing=False):
    """Return the `DeviceMemory` of one device that accumulates the gradients of `images` in so many parts."""
    rung, batch = "ddp" if case.devices > 1 else "single", images * case.devices
    saving = {"precision": precision, "activation_checkpointing": checkpointing}
    return _dry_run(case, settled(case.subject, rung, batch, case.devices, microbatches=parts, **saving)).devices[0]


def counted(case, rung, rank=0, replicas=None, **settings):
    """Dry-run one rank of a rung: return its peak memory and the bytes that it sends."""
    s = settled(case.subject, rung, case.batch, case.devices, replicas, **settings)
    found = _dry_run(case, s, rank)
    return found.devices[0].peak, ring_bytes(found.messages, replicas or s.devices)


def each_stage(case, schedule, microbatches, cut) -> list:
    """Dry-run every rank of a pipeline: return the `DeviceMemory` of each device."""
    from mpdemo.plan import memory

    options = {"schedule": schedule, "microbatches": microbatches, "cut": cut}
    s = settled(case.subject, "pipeline", case.batch, case.devices, **options)
    return [rank.devices[0] for rank in memory.processes(case.subject, s, STATES[case.optimizer])]


def _dry_run(case, s, rank=0):
    """Return the `mpdemo.plan.memory.Counted` of one rank."""
    from mpdemo.plan import memory

    if s.rung in CUT_RUNGS:
        return memory.of_rank(case.subject, s, rank, STATES[case.optimizer])
    return memory.processes(case.subject, s, STATES[case.optimizer])[0]


def ring_bytes(messages, ranks) -> float:
    """Return the bytes that each of `ranks` devices sends, with collectives that go round a ring.

    `messages` are those of `mpdemo.plan.memory.Counted`: the whole tensor that is reduced, or that all parts make.
    """
    share = (ranks - 1) / ranks
    return sum(HALVES[kind] * share * size if kind in HALVES else size for kind, size in messages.items())


def mib(number):
    """Return bytes as text, in MiB."""
    return f"{number / MIB:,.0f} MiB"
