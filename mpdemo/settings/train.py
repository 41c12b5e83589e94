"""Every setting of a training run, said once: its type, its unit, what is allowed, its default. Needs no PyTorch.

The command line of ``mpdemo train`` and of every rung, `mpdemo.jobs.spec_of` and the checks are made from this class.
The course model's own settings are those of `recipe`.
"""

import os
from dataclasses import asdict, fields, replace
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from mpdemo.errors import UserError, one_line_errors
from mpdemo.options import as_arguments, option_name
from mpdemo.settings.cuts import DEPTH
from mpdemo.settings.rules import records_timeline, settled
from mpdemo.settings.schedules import SCHEDULES, schedule_name

Rung = Literal["single", "data_parallel", "ddp", "model_parallel", "pipeline", "hybrid", "fsdp", "tensor"]
Form = Literal["one-process", "per-device"]
Model = Literal["toy", "convnet", "resnet18", "resnet50", "resnet101", "transformer", "convstack"]
Norm = Literal["batch", "group"]
Dataset = Literal["digits", "mnist", "imagenet", "folder"]
Optimizer = Literal["sgd", "adamw"]
Count = Annotated[int, Field(ge=1, le=10**9)]
Pixels = Annotated[int, Field(ge=1, le=4096)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# Of the course model, a vision transformer of eight equal blocks that learns the digits: the same run with every
# strategy, so that the runs can be compared.
RECIPE = {
    "model": "transformer",
    "dataset": "digits",
    "batch_size": 64,
    "epochs": 2,
    "optimizer": "adamw",
    "lr": 1e-3,
    "warmup_steps": 10,
    "lr_schedule": "cosine",
}
PIPELINE = {"schedule": "Interleaved1F1B", "microbatches": 4}  # two stages per device: the shorter bubble


def _path(text):
    if not text.strip() or "\0" in text or max(map(len, os.fsencode(text).split(b"/"))) > 255:
        raise ValueError("allowed: a path that is not empty, of names of at most 255 bytes")
    return text


PathName = Annotated[str, AfterValidator(_path)]


Schedule = Annotated[Literal[tuple(SCHEDULES)], BeforeValidator(schedule_name)]

RUNGS, MODELS, NORMS = map(get_args, (Rung, Model, Norm))
LEARNING_RATES = {"sgd": 0.01, "adamw": 0.001}  # by default
RUNG_FORMS = {  # the first form is the default
    "single": ("one-process",),
    "data_parallel": ("one-process",),
    "ddp": ("per-device",),
    "model_parallel": ("per-device", "one-process"),
    "pipeline": ("per-device", "one-process"),
    "hybrid": ("per-device",),
    "fsdp": ("per-device",),
    "tensor": ("per-device",),
}


def setting(default, description):
    """Declare one setting."""
    return Field(default, description=description)


@one_line_errors(option_name)
@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings:
    """What to train, how, and where to write it. `checked` fills in what is None."""

    rung: Rung = Field(description="how the training is spread over devices")
    recipe: Literal["course"] | None = setting(None, "the course model's settings, which other options change")
    form: Form | None = setting(None, "one process drives all devices, or one process per device")
    model: Model = setting("convnet", "the network")
    norm: Norm = setting("batch", "normalisation of convolutional models")
    dataset: Dataset = setting("digits", "what to train on; digits ships with the package")
    data: PathName | None = setting(None, "folder of the data set (default: MPDEMO_DATA)")
    image_size: Pixels | None = setting(None, "pixels per side (default: 28 for digits and mnist, else 224)")
    batch_size: Count = setting(128, "images per step, over all processes together")
    epochs: Count | None = setting(None, "passes over the training images (default: 1, without --steps)")
    steps: Count | None = setting(None, "stop after this many steps, or after --epochs if that is earlier")
    optimizer: Optimizer = setting("sgd", "what updates the weights: SGD with momentum 0.9, or AdamW")
    lr: Rate | None = setting(None, "learning rate (default: 0.01 with sgd, 0.001 with adamw)")
    warmup_steps: int = Field(0, ge=0, le=10**9, description="first steps, over which the learning rate grows to --lr")
    lr_schedule: Literal["constant", "cosine"] = setting(
        "constant", "learning rate after the warm-up: --lr, or along a half cosine to 0 at the end of all --epochs"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="of the initial weights and of the order of the images")
    processes: Count | None = setting(None, "outside torchrun and Slurm: how many to start (default: 2; hybrid: 4)")
    oversubscribe: bool = setting(False, "start more processes than there are CPU cores, or than memory allows")
    devices: Count | None = setting(None, "how many devices a one-process form drives (default: 2)")
    replicas: Count | None = setting(None, "of rung hybrid: copies of the cut model (default: 2)")
    sharded: bool = setting(False, "of rung hybrid: the replicas divide every stage among them, as FSDP does")
    microbatches: Count | None = setting(
        None, "parts of a process's share, one after the other or down a pipeline (default: 1; pipelines: 4 per device)"
    )
    schedule: Schedule = setting("1F1B", "of a pipeline with one process per device: what a device computes when")
    cut: str | None = setting(None, "last block of each stage but the last: names or numbers, separated by commas")
    precision: Literal["fp32", "bf16"] = setting("fp32", "type that autocast computes in")
    activation_checkpointing: bool = setting(False, "keep only each block's input, and compute the block twice")
    compile: bool = setting(False, "compile every block in the first step (needs a C++ compiler)")
    out: PathName = setting("runs/train", "run folder: metrics, summary, checkpoints")
    checkpoint_every: Count | None = setting(None, "steps between checkpoints (default: none is written)")
    resume: PathName | None = setting(None, "run folder whose newest checkpoint to resume; auto: --out, if it has one")
    workers: int = Field(
        0, ge=0, le=256, description="loader processes per rank; with 0 the rank decodes its images itself"
    )
    log_every: Count = setting(10, "steps between two log entries; each waits for the device")
    profile: Count | None = setting(
        None, "record so many steps of each rank, after the first two, into --out (traces that ui.perfetto.dev shows)"
    )
    timeline: bool = setting(False, "record what each rank did when (per-device forms of a cut model)")

    @model_validator(mode="before")
    @classmethod
    def from_recipe(cls, data):
        """Put the settings of a recipe in place of its name; what is given beside it counts more."""
        given = data.kwargs or {}
        if given.get("recipe") != "course" or given.get("rung") not in RUNGS:
            return data
        return recipe(**{name: value for name, value in given.items() if name != "recipe"})

    def as_dict(self) -> dict:
        """Return the settings as plain values."""
        return asdict(self)

    def arguments(self) -> list[str]:
        """Return the command-line arguments that give these settings, leaving out those with their default."""
        defaults = {field.name: field.default.default for field in fields(self)}
        given = {name: value for name, value in asdict(self).items() if value != defaults[name] or name == "model"}
        return as_arguments(given)


def checked(settings: Settings, world_size: int | None = None) -> Settings:
    """Return the settings with all defaults that depend on others; refuse what cannot work together.

    Where there is a launcher, `world_size` is the number of its processes; else the setting `processes` counts.
    """
    s, forms = settings, RUNG_FORMS[settings.rung]
    if s.form not in (None, *forms):
        raise UserError(f"rung {s.rung} has no form {s.form!r}; allowed: {', '.join(forms)}")
    s = replace(
        s,
        form=s.form or forms[0],
        epochs=1 if s.steps is None and s.epochs is None else s.epochs,
        lr=s.lr or LEARNING_RATES[s.optimizer],
        image_size=s.image_size or (28 if s.dataset in ("digits", "mnist") else 224),
    )
    return settled(s, world_size)


def recipe(rung, **changes) -> dict:
    """Return the settings of the course model's training run with a strategy, in the folder ``runs/train_RUNG``.

    The changes are added or replace some; None leaves a setting to its default.
    """
    form = changes.get("form") or RUNG_FORMS.get(rung, (None,))[0]
    settings = {"rung": rung, **RECIPE, "out": f"runs/train_{rung}"}
    if records_timeline(rung, form):
        settings["timeline"] = True
    if rung in ("pipeline", "hybrid"):
        if form == "per-device":
            settings.update(PIPELINE, cut=equal_cut(4))
        else:
            settings["microbatches"] = 4
    return settings | changes


def equal_cut(stages) -> str:
    """Cut the transformer's eight blocks into equal stages (2, 4 or 8), as ``--cut`` takes it."""
    return ",".join(f"block.{DEPTH * number // stages - 1}" for number in range(1, stages))
