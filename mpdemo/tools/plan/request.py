"""What is to be planned, and what one way to train needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpdemo.errors import UserError
from mpdemo.tools.plan.efficiency import Efficiency, known_of
from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.roof import MIB, OPTIMIZERS, RESERVE, roof

IN_BLOCKS = "all-reduce in blocks"  # of tensor parallelism: a kind of message of its own, on another link
# The host is assumed: 32 cores, each of which moves 28 bytes of AdamW's in 3.2 ns, as measured on one core in notebook
# 74. Together that is 280 GB/s, and eight channels of DDR5-4800 have 307, so more cores would hardly help.
CORES, BILLION_UPDATES = 32, 3.2
# How a step computes -> what it is, in words. Master weights, gradients and states stay in float32 in all of them.
PRECISIONS = {
    "fp32": "float32, in which a GPU's convolutions are TF32 and its matrix products are not",
    "tf32": 'TF32 in matrix products as well: torch.set_float32_matmul_precision("high")',
    "autocast": "torch.autocast to bfloat16, also under FSDP, which gathers weights in 16 bits",
    "fp16": "torch.autocast to float16, with a GradScaler",
    "bf16": "weights and activations cast to bfloat16, as by FSDP's MixedPrecisionPolicy, and for DDP by replicate's; "
    "no autocast",
}


class NotPlanned(UserError):
    """Why a strategy is not planned for a model, in words."""


class Rule(NamedTuple):
    """One way to train: a mesh, a precision, and what is computed twice."""

    mesh: str
    precision: str
    again: str  # one of `mpdemo.tools.plan.own.AGAIN`
    why: str  # a sentence with {devices}
    find: Callable  # request -> the first `Prediction` that fits, or that needs least

    @property
    def kind(self) -> str:
        """What it is compared by: with a run that recomputes less or in other parts, too."""
        return ", ".join([self.mesh, *([self.precision] if self.precision != "fp32" else [])])

    @property
    def answer(self) -> str:
        """What the table calls it."""
        return self.kind + self.again


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
        One of `mpdemo.tools.plan.roof.OPTIMIZERS`.
    gpu : str
        One of `mpdemo.tools.plan.gpus.GPUS`, whose data sheet the times are from. An A100 of 40 GiB by default.
    total, price : float, optional
        Tokens, images or samples of the whole run, and what an hour of one GPU costs.
    efficiency : Efficiency
        What its kernels reach of the data sheet; without it what is known of that GPU.
    precision : str, optional
        One of `PRECISIONS`, in which all ways compute; without it the usual one in 16 bits.
    compiled : bool
        Whether torch.compile has compiled the step, which then keeps less.
    everything : bool
        Whether to plan also what is seldom best: float32, for instance.
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
    precision: str | None = None
    compiled: bool = False
    everything: bool = False
    progress: Callable = field(default=lambda way: None, compare=False)  # is told what is being planned

    def __post_init__(self):
        object.__setattr__(self, "efficiency", self.efficiency or known_of(self.gpu))

    @property
    def precisions(self) -> list:
        """What the ways compute in, the same for all: what is usual, and with `everything` float32 as well.

        FSDP cannot cast batch norm, and on one device autocast is usual.
        """
        if self.precision:
            return [self.precision]
        usual = "autocast" if self.devices == 1 or self.model.batch_norm else "bf16"
        usual = "fp16" if "fp16" in GPUS[self.gpu].peaks else usual
        return [usual, "fp32"] if self.everything else [usual]

    def roof(self, precision):
        """Return what a device does per second."""
        return roof(self.gpu, self.efficiency, precision == "tf32")

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
        return self.model.weights + (1 + OPTIMIZERS[self.optimizer].states) * self.model.trained


class Prediction(NamedTuple):
    """What one way to train needs."""

    memory: float  # bytes on the fullest device
    seconds: float | None  # of a step; None where no data sheet says it
    sent: float  # bytes that this device sends in a step
    sending: float  # seconds that this takes, hidden behind the computation or not
    parts: int = 1  # microbatches
    flags: str = ""  # of notebooks/scripts/train_gpt.py, which computes so; "" where it can't
    stages: tuple = ()  # of a pipeline with few stages: bytes on each device, in order
    compiled: float | None = None  # seconds with memory-bound kernels fused
    between: tuple = ()  # the least and the most seconds
    fused: float | None = None  # bytes if kernels are fused; where it does not fit otherwise
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
    processes, optimizer = request.devices // request.nodes, OPTIMIZERS[request.optimizer]
    moved = min(optimizer.moved, OPTIMIZERS["adamw-fused"].moved)  # a host's update is fused
    per_byte = BILLION_UPDATES / 1e9 * moved / OPTIMIZERS["adamw-fused"].moved / 4
    held = step.weights + (1 + optimizer.states) * step.trained
    return processes * step.trained * per_byte / CORES, processes * held


def flags_of(way, parts, replicate=1, pp=1) -> str:
    """Return the flags with which notebooks/scripts/train_gpt.py computes in such a way; "" where it can't."""
    if way.rank or way.selective or way.offload or way.half == "autocast":
        return ""
    mesh = {"pp": pp, "replicate": replicate, "shard": way.shards, "tp": way.tensor, "microbatches": parts}
    switches = {"bf16": way.half, "recompute": way.checkpointing}
    used = [f"--{name} {number}" for name, number in mesh.items() if number > 1]
    return " ".join([*used, *(f"--{name}" if on else f"--no-{name}" for name, on in switches.items())])
