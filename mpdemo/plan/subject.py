"""What a plan is about: a model and its data, the settings of a training run, the memory of a device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.settings import RUNG_FORMS, Settings

MIB = 2**20
RESERVE = 768 * MIB  # of a GPU's memory, kept for the CUDA context (about 500 MiB) and for workspaces
STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # optimizer state, in values per parameter


class ModelFailed(UserError):
    """A reader's own model cannot compute a step with some strategy, though it computes one by itself."""


class Subject(NamedTuple):
    """A model and the samples that it takes.

    The model is one of ``mpdemo.settings.MODELS``, a function that returns `mpdemo.models.Blocks`, or a
    `mpdemo.models.own.OwnModel`, which is planned whole.
    """

    model: str | Callable
    image_size: int = 224
    classes: int = 1000
    channels: int = 3
    norm: str = "batch"

    @property
    def is_own(self):
        """Whether the model is any module of a reader's, which is no list of blocks."""
        return hasattr(self.model, "whole")


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device at the peak of a training step, in bytes.

    `gradients` are those that exist at the peak: none if it is the end of the forward pass and each step begins without
    any, all if DDP keeps them in its buckets. `activations` is all that is not weights, gradients or optimizer state:
    saved activations, the batch, and temporary tensors of the backward pass.
    """

    device: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self):
        """Bytes of all four together."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def with_peak(self, peak):
        """Return the same with so many bytes at the peak."""
        return replace(self, activations=peak - self.weights - self.gradients - self.optimizer)


def settled(subject, rung, batch, devices=1, replicas=None, **more) -> Settings:
    """Return the settings of a training run of any model, as `mpdemo.settings.checked` would return them.

    `devices` are those of a replica where there are `replicas`. A model that the settings do not know is called toy.
    """
    model = subject.model if isinstance(subject.model, str) else "toy"
    form = more.pop("form", RUNG_FORMS[rung][0])
    s = Settings(rung=rung, model=model, batch_size=batch, image_size=subject.image_size or None, **more)
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
