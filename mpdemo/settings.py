"""Every setting of a training run, said once: its type, its unit, what is allowed, its default. Needs no PyTorch.

The command line of ``python -m mpdemo train``, `mpdemo.jobs.train_command` and the checks are made from this class.
"""

from dataclasses import asdict, fields, replace
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from mpdemo.cuts import block_names, resolve_cut
from mpdemo.errors import UserError, one_line_errors
from mpdemo.options import option_name
from mpdemo.schedules import SCHEDULES, check_schedule

Rung = Literal["single", "data_parallel", "ddp", "model_parallel", "pipeline"]
Form = Literal["one-process", "per-device"]
Model = Literal["toy", "convnet", "resnet18", "resnet50", "resnet101", "transformer", "convstack"]
Norm = Literal["batch", "group"]
Dataset = Literal["digits", "mnist", "imagenet", "folder"]
Count = Annotated[int, Field(ge=1)]

RUNGS, FORMS, MODELS, NORMS, DATASETS = map(get_args, (Rung, Form, Model, Norm, Dataset))
RUNG_FORMS = {  # the first form is the default
    "single": ("one-process",),
    "data_parallel": ("one-process",),
    "ddp": ("per-device",),
    "model_parallel": ("per-device", "one-process"),
    "pipeline": ("per-device", "one-process"),
}


def setting(default, description):
    """Declare one setting."""
    return Field(default, description=description)


@one_line_errors(option_name)
@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings:
    """What to train, how, and where to write it. `checked` fills in what is None.

    Raises
    ------
    UserError
        An unknown name or a value that is not allowed, with the nearest name that is.
    """

    rung: Rung = Field(description="how the training is spread over devices")
    form: Form | None = setting(None, "one process drives all devices, or one process per device")
    model: Model = setting("convnet", "the network")
    norm: Norm = setting("batch", "normalisation of convolutional models")
    dataset: Dataset = setting("digits", "what to train on; digits ships with the package")
    data: str | None = setting(None, "folder of the data set (default: MPDEMO_DATA)")
    image_size: Count | None = setting(None, "pixels per side (default: 28 for digits and mnist, else 224)")
    batch_size: Count = setting(128, "images per step, over all processes together")
    epochs: Count | None = setting(None, "passes over the training images (default: 1, without --steps)")
    steps: Count | None = setting(None, "stop after this many steps, instead of after --epochs")
    lr: float = Field(0.01, gt=0, description="learning rate of SGD with momentum 0.9")
    seed: int = setting(0, "of the initial weights and of the order of the images")
    processes: Count | None = setting(None, "outside torchrun and Slurm: how many to start (default: 2)")
    oversubscribe: bool = setting(False, "start more processes than there are CPU cores, or than memory allows")
    devices: Count | None = setting(None, "how many devices a one-process form drives (default: 2)")
    microbatches: Count | None = setting(None, "parts of the batch, or of a replica's share (pipelines: 4 per stage)")
    schedule: Literal[tuple(SCHEDULES)] = setting("1f1b", "order of work of a per-device pipeline")
    stages_per_rank: Count | None = setting(None, "of a pipeline (default: as many as the schedule uses)")
    cut: str | None = setting(None, "last block of each stage but the last: names or numbers, separated by commas")
    precision: Literal["fp32", "bf16", "fp16"] = setting("fp32", "type that autocast computes in")
    out: str = setting("runs/train", "run folder: metrics, summary, checkpoints")
    checkpoint_every: Count | None = setting(None, "steps between checkpoints (default: none is written)")
    resume: str | None = setting(None, "run folder whose newest checkpoint to go on from; auto: --out, if it has one")
    workers: int = Field(0, ge=0, description="loader processes per rank; with 0 the rank decodes its images itself")
    log_every: Count = setting(10, "steps between two log entries; each waits for the device")
    timeline: bool = setting(False, "record what each rank did when (per-device forms of a cut model)")

    def as_dict(self) -> dict:
        """Return the settings as plain values."""
        return asdict(self)

    def arguments(self) -> list[str]:
        """Return the command-line arguments that give these settings, leaving out those with their default."""
        defaults = {field.name: field.default.default for field in fields(self)}
        given = {name: value for name, value in asdict(self).items() if value != defaults[name] or name == "model"}
        return as_arguments(given)


def as_arguments(values) -> list[str]:
    """Return values by setting as command-line arguments; None and False are left out, True is an option alone."""
    arguments = []
    for name, value in values.items():
        text = str(value)
        if value is True:
            arguments.append(option_name(name))
        elif value is not None and value is not False:
            arguments += [f"{option_name(name)}={text}"] if text.startswith("-") else [option_name(name), text]
    return arguments


def _require(condition, message):
    if not condition:
        raise UserError(message)


def checked(settings: Settings, world_size: int | None = None) -> Settings:
    """Return the settings with all defaults that depend on others; refuse what cannot work together.

    Parameters
    ----------
    world_size : int, optional
        Processes of the launcher, where there is one; else `processes` counts.

    Raises
    ------
    UserError
        With the value, what is allowed and what to do.
    """
    s, forms = settings, RUNG_FORMS[settings.rung]
    _require(s.form in (None, *forms), f"rung {s.rung} has no form {s.form!r}; allowed: {', '.join(forms)}")
    _require(
        s.epochs is None or s.steps is None, f"--steps {s.steps} is not allowed with --epochs {s.epochs}; give one"
    )
    s = replace(
        s,
        form=s.form or forms[0],
        epochs=1 if s.steps is None and s.epochs is None else s.epochs,
        image_size=s.image_size or (28 if s.dataset in ("digits", "mnist") else 224),
    )
    recorded = s.form == "per-device" and s.rung in ("model_parallel", "pipeline")
    _require(recorded or not s.timeline, "--timeline records rungs model_parallel and pipeline in the form per-device")
    s = _with_processes(s, world_size)
    return _with_stages(s) if s.rung == "pipeline" else _with_parts(s)


def _with_processes(s, world_size):
    """Settle how many processes and devices there are."""
    if s.form == "per-device":
        if world_size is not None and s.processes not in (None, world_size):
            raise UserError(
                f"--processes {s.processes} contradicts the launcher's {world_size} processes; leave it out"
            )
        count = world_size or s.processes or 2
        return replace(s, processes=count, devices=count)
    started = world_size if world_size is not None else s.processes
    more = "" if s.rung == "single" else " (and say --devices for how many devices it drives)"
    _require(
        started in (None, 1),
        f"rung {s.rung} in the one-process form was started as {started} processes; start 1{more}",
    )
    return replace(s, processes=1, devices=1 if s.rung == "single" else s.devices or 2)


def _with_parts(s):
    """Settle the parts of a batch whose gradients are accumulated, and refuse a batch that does not divide."""
    parts, shares = s.microbatches or 1, s.devices if s.rung in ("ddp", "data_parallel") else 1
    _require(
        parts == 1 or s.rung != "model_parallel",
        f"rung model_parallel takes no --microbatches {parts}: with them it is --rung pipeline",
    )
    if s.rung == "model_parallel":
        resolve_cut(block_names(s.model), s.cut, s.devices)
    divisor = shares * parts
    over = f"{shares} devices" if parts == 1 else f"{parts} microbatches" + (f" on {shares} devices" * (shares > 1))
    _require(
        s.batch_size % divisor == 0,
        f"--batch-size {s.batch_size} (all processes together) does not divide by {over}; "
        f"allowed: a multiple of {divisor}, such as {max(1, s.batch_size // divisor) * divisor}",
    )
    return replace(s, microbatches=parts)


def _with_stages(s):
    """Settle microbatches and stages of a pipeline."""
    schedule = "gpipe" if s.form == "one-process" else s.schedule  # one process: all forwards, then all backwards
    parts = s.microbatches
    if parts is None:
        parts = next((m for m in (4 * s.devices, 2 * s.devices) if s.batch_size % m == 0), s.devices)
        parts = 1 if schedule == "naive" else parts
    stages_per_rank = check_schedule(schedule, s.devices, parts, s.stages_per_rank, s.batch_size)
    _require(
        schedule == "naive" or parts >= s.devices,
        f"{parts} microbatches are fewer than the {s.devices} devices, so some would never work; "
        f"allowed: {s.devices} or more, or --schedule naive",
    )
    resolve_cut(block_names(s.model), s.cut, s.devices * stages_per_rank)
    return replace(s, schedule=schedule, microbatches=parts, stages_per_rank=stages_per_rank)
