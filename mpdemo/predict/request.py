"""What is to be planned: a model, a batch and the devices that are available; and what one way to train needs.

`mpdemo.tools.plan.choose` asks its rules in order. Taught in notebooks/12_which_one.ipynb.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from mpdemo.errors import UserError
from mpdemo.predict.footprint import costs, footprints
from mpdemo.settings import RUNG_FORMS, Settings
from mpdemo.world.gpus import GPUS

MIB = 2**20
RESERVE = 768 * MIB  # of a GPU's memory, kept for the CUDA context (about 500 MiB) and for workspaces
STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # optimizer state, in values per parameter


class NotPlanned(UserError):
    """Why a strategy is not planned for a reader's own model, in words."""


class NotNeeded(NotPlanned):
    """A strategy that has no row, since one that saves less memory fits."""


class Rule(NamedTuple):
    """One question of the decision, and the answer where it fits."""

    rung: str
    answer: str
    why: str  # a sentence with {parts}, {devices} (that are used) and {all}
    find: Callable  # request -> the first `Prediction` that fits, or that needs least; None where it cannot be done


ACCUMULATION, CHECKPOINTING = ", gradient accumulation", ", activation checkpointing"
BOTH = ", bf16" + CHECKPOINTING
ALL = BOTH + ACCUMULATION
WAYS = {  # how an answer goes on: how its batch fits, and the options of its finder
    "": ("at once", {"parts": (1,)}),
    ACCUMULATION: ("with gradient accumulation over {parts} microbatches", {"parts": None}),
    ", bf16": ("in bf16", {"bf16": True}),
    CHECKPOINTING: ("with activation checkpointing", {"checkpointing": True}),
    BOTH: ("in bf16, with activation checkpointing", {"bf16": True, "checkpointing": True}),
    ALL: (
        "in bf16, with activation checkpointing, over {parts} microbatches",
        {"bf16": True, "checkpointing": True},
    ),
}
# Those of a replica, which is accumulated wherever it does not fit at once.
WHOLE = ("", ACCUMULATION, ", bf16", CHECKPOINTING)


def rules(answer, why, find, ways) -> list[Rule]:
    """Return the rules of one strategy, for some of the `WAYS` in which its batch may fit."""
    rung = answer.split(",")[0]
    return [Rule(rung, answer + way, f"{why} {WAYS[way][0]}", partial(find, **WAYS[way][1])) for way in ways]


class ModelSpec(NamedTuple):
    """A model and its samples: one of ``mpdemo.settings.MODELS``, or a `mpdemo.tools.plan.own_model.OwnModel`."""

    model: Any
    image_size: int = 224
    classes: int = 1000
    channels: int = 3
    norm: str = "batch"

    @property
    def is_own(self):
        """Whether the model is a module of the reader's, which is no list of blocks."""
        return hasattr(self.model, "layers_of")


def _quiet(strategy: str) -> None:
    """Say nothing of what is being planned."""


@dataclass(frozen=True)
class PlanRequest:
    """What is to be trained, and on what.

    Attributes
    ----------
    model : str or OwnModel
        One of ``mpdemo.settings.MODELS``, or a `mpdemo.tools.plan.own_model.OwnModel`.
    batch : int
        Images of a whole step, over all devices together.
    devices, nodes : int
        How many there are, in how many machines.
    memory : float
        Bytes of one device; `RESERVE` of them are kept for CUDA.
    optimizer : str
        "sgd", "momentum" or "adamw".
    gpu : str
        One of `mpdemo.world.gpus.GPUS`, from whose data sheet the times are estimated. An A100 of 40 GiB by default.
    """

    model: Any
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
    progress: Callable = field(default=_quiet, compare=False)  # is told what is being planned

    @property
    def spec(self) -> ModelSpec:
        """The model and its data."""
        return ModelSpec(self.model, self.image_size, self.classes, self.channels, self.norm)

    @property
    def limit(self) -> float:
        """Bytes of one device that PyTorch may use."""
        return self.memory - RESERVE

    @property
    def link(self) -> float:
        """Bytes per second between two devices: of one node, or of the slower link between nodes."""
        return GPUS[self.gpu].link if self.nodes == 1 else GPUS[self.gpu].between

    def blocks(self) -> list:
        """Return the footprints of the blocks of a model of the course."""
        return footprints(self.spec)

    def states(self) -> float:
        """Return the bytes of weights, gradients and optimizer states, which no smaller batch makes smaller."""
        if self.spec.is_own:
            return self.model.weights + (1 + STATES[self.optimizer]) * self.model.trained
        return sum(b.weights + (1 + STATES[self.optimizer]) * b.gradients for b in self.blocks())

    @property
    def one_device_seconds(self) -> float:
        """Seconds of a step on one device that had room for the whole batch."""
        return sum(cost.both for cost in self.costs(self.batch))

    def costs(self, size: int, precision: str = "fp32") -> list:
        """Return the estimated costs of the blocks for `size` images; [] where no data sheet says them."""
        return costs(self.spec, size, self.gpu, precision)


class Prediction(NamedTuple):
    """What one way to train needs."""

    settings: dict  # of ``mpdemo train``, without the model and the data
    memory: float  # bytes on the fullest device
    seconds: float | None = None  # of a step without messages; None where no data sheet says it
    sent: float = 0.0  # bytes that this device sends in a step
    stages: tuple = ()  # of a pipeline with few stages: bytes on each device, in order
    sending: float | None = None  # seconds that this takes, where links of both kinds are used
    most: Callable = lambda: None  # -> samples of the largest batch that fits; None where that cannot be told

    def seconds_sending(self, request):
        """Return the seconds that the messages take, on the request's link unless they are known."""
        return self.sent / request.link if self.sending is None else self.sending


def settled(spec, rung, batch, devices=1, replicas=None, **more) -> Settings:
    """Return the settings of a training run of a model of the course, as `mpdemo.settings.checked` would return them.

    `devices` are those of a replica where there are `replicas`.
    """
    form = more.pop("form", RUNG_FORMS[rung][0])
    s = Settings(rung=rung, model=spec.model, batch_size=batch, image_size=spec.image_size, **more)
    return replace(
        s,
        form=form,
        devices=devices,
        replicas=replicas,
        processes=1 if form == "one-process" else devices * (replicas or 1),
        microbatches=s.microbatches or 1,
        epochs=1,
        lr=1.0,
    )


def mib(number):
    """Return bytes as text, in MiB."""
    return f"{number / MIB:,.0f} MiB"
