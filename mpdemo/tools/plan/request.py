"""What is to be planned, the rules that try to make it fit, and what one way to train needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from mpdemo.errors import UserError
from mpdemo.tools.plan.efficiency import AT_BEST, MEASURED, Efficiency
from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.roof import MIB, RESERVE, STATES, roof

IN_BLOCKS = "all-reduce in blocks"  # of tensor parallelism: a kind of message of its own, on another link


FUSED = {"sgd": 3, "momentum": 5, "adamw": 7}  # values that a fused update moves per parameter
# The host is assumed: 32 cores, each of which moves 28 bytes of AdamW's in 3.2 ns, as measured on one core in notebook
# 12. Together that is 280 GB/s, and eight channels of DDR5-4800 have 307, so more cores would hardly help.
CORES, BILLION_UPDATES = 32, 3.2


class NotPlanned(UserError):
    """Why a strategy is not planned for a model, in words."""


class NotNeeded(NotPlanned):
    """A strategy that has no row, since one that saves less memory fits."""


class Rule(NamedTuple):
    """One question of the decision, and the answer where it fits."""

    answer: str
    why: str  # a sentence with {parts} and {devices}
    find: Callable  # request -> the first `Prediction` that fits, or that needs least


ACCUMULATION, CHECKPOINTING = ", gradient accumulation", ", activation checkpointing"
BOTH = ", bf16" + CHECKPOINTING
ALL = BOTH + ACCUMULATION
SELECTIVE, OFFLOAD = ", bf16, selective checkpointing", BOTH + ", offload"
WAYS = {  # how an answer goes on: how its batch fits, and the options of its finder
    "": ("at once", {"parts": (1,)}),
    ACCUMULATION: ("with gradient accumulation over {parts} microbatches", {"parts": None}),
    ", bf16": ("in bf16", {"bf16": True}),
    CHECKPOINTING: ("with activation checkpointing", {"checkpointing": True}),
    BOTH: ("in bf16, with activation checkpointing", {"bf16": True, "checkpointing": True}),
    SELECTIVE: (
        "in bf16, with activation checkpointing that keeps what matrix products, convolutions and attention computed",
        {"bf16": True, "checkpointing": True, "selective": True},
    ),
    OFFLOAD: (
        "in bf16, with activation checkpointing, and weights, gradients and states in the host's memory",
        {"bf16": True, "checkpointing": True, "offload": True},
    ),
    ALL: (
        "in bf16, with activation checkpointing, over {parts} microbatches",
        {"bf16": True, "checkpointing": True},
    ),
}


def rules(answer, why, find, ways) -> list[Rule]:
    """Return the rules of one strategy, for some of the `WAYS` in which its batch may fit."""
    return [Rule(answer + way, f"{why} {WAYS[way][0]}", partial(find, **WAYS[way][1])) for way in ways]


def _quiet(strategy: str) -> None:
    """Say nothing of what is being planned."""


@dataclass(frozen=True)
class PlanRequest:
    """What is to be trained, and on what.

    Attributes
    ----------
    model : OwnModel
        A `mpdemo.tools.plan.own_model.OwnModel`.
    batch : int
        Samples of a whole step, over all devices together.
    devices, nodes : int
        How many there are, in how many machines.
    memory : float
        Bytes of one device; `RESERVE` of them are kept for CUDA.
    optimizer : str
        "sgd", "momentum" or "adamw".
    gpu : str
        One of `mpdemo.tools.plan.gpus.GPUS`, whose data sheet the times are from. An A100 of 40 GiB by default.
    total, price : float, optional
        Tokens, images or samples of the whole run, and what an hour of one GPU costs.
    efficiency : Efficiency
        What its kernels reach of the data sheet; without it what is known of that GPU.
    """

    model: Any
    batch: int
    devices: int = 1
    nodes: int = 1
    memory: float = 40 * 2**30
    optimizer: str = "adamw"
    gpu: str = "a100"
    total: float | None = None
    price: float | None = None
    efficiency: Efficiency | None = None
    progress: Callable = field(default=_quiet, compare=False)  # is told what is being planned

    def __post_init__(self):
        known = self.efficiency or MEASURED.get(self.gpu, AT_BEST)
        object.__setattr__(self, "efficiency", known)

    @property
    def roof(self):
        """What a device does per second."""
        return roof(self.gpu, self.efficiency)

    @property
    def several(self) -> float:
        """What is left of the speed of kernels."""
        return self.efficiency.several if self.devices > 1 else 1.0

    @property
    def limit(self) -> float:
        """Bytes of one device that PyTorch may use."""
        return self.memory - RESERVE

    def link(self, devices: int) -> float:
        """Bytes per second around a ring that enters each node through the ports of so many of its devices."""
        sheet = GPUS[self.gpu]
        return sheet.link if self.nodes == 1 else min(sheet.link, devices * sheet.between)

    def states(self) -> float:
        """Return the bytes of weights, gradients and optimizer states, which no smaller batch makes smaller."""
        return self.model.weights + (1 + STATES[self.optimizer]) * self.model.trained


class Prediction(NamedTuple):
    """What one way to train needs."""

    memory: float  # bytes on the fullest device
    seconds: float | None  # of a step; None where no data sheet says it
    sent: float  # bytes that this device sends in a step
    sending: float  # seconds that this takes, hidden behind the computation or not
    parts: int = 1  # microbatches
    flags: str = ""  # of notebooks/scripts/train_gpt.py, which computes so; "" where it can't
    stages: tuple = ()  # of a pipeline with few stages: bytes on each device, in order
    spread: float = 0.0  # of the seconds, to either side, as a fraction
    # -> samples of the largest batch that fits; None where that cannot be told
    most: Callable = lambda: None
    # bytes that go between this device and its host in a step, and the least seconds it takes
    moved: float = 0.0
    least: float = 0.0
    updating: float = 0.0  # seconds of the host's update, and bytes in the memory of each node's host
    on_host: float = 0.0


def mib(number: float) -> str:
    """Return bytes as text, in MiB."""
    return f"{number / MIB:,.0f} MiB"


def local_batch(request, replicas) -> int:
    """Return how many samples each of so many replicas computes."""
    if request.batch % replicas:
        raise NotPlanned(f"a batch of {request.batch} does not divide by {replicas}")
    return request.batch // replicas


def first_that_fits(request, find, numbers) -> Prediction:
    """Return `find` of the first number that fits, or of the one that needs least; larger numbers need less memory."""
    first = find(numbers[0])
    if first.memory <= request.limit or len(numbers) == 1:
        return first
    last = find(numbers[-1])
    if last.memory > request.limit:
        return min(first, last, key=lambda found: found.memory)
    return next(found for found in map(find, numbers[1:]) if found.memory <= request.limit)


def host_of(request, step) -> tuple:
    """Return the seconds in which a host updates what its node offloads, and the bytes that it keeps of this."""
    processes, values = request.devices // request.nodes, 1 + STATES[request.optimizer]
    per_byte = BILLION_UPDATES / 1e9 * FUSED[request.optimizer] / FUSED["adamw"] / 4
    return processes * step.trained * per_byte / CORES, processes * (step.weights + values * step.trained)


def flags_of(way, parts, replicate=1, pp=1) -> str:
    """Return the flags with which notebooks/scripts/train_gpt.py computes in such a way; "" where it can't."""
    if way.rank or way.selective or way.offload:
        return ""
    mesh = {"pp": pp, "replicate": replicate, "shard": way.shards, "tp": way.tensor, "microbatches": parts}
    switches = {"bf16": way.bf16, "recompute": way.checkpointing}
    used = [f"--{name} {number}" for name, number in mesh.items() if number > 1]
    return " ".join([*used, *(f"--{name}" if on else f"--no-{name}" for name, on in switches.items())])
