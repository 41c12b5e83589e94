"""Every setting of a training run, said once: its type, its unit, what is allowed, its default. Needs no PyTorch.

The command line of ``python -m mpdemo train`` and of every rung, `mpdemo.jobs.train_command` and the checks are made
from this class.
"""

import os
import shutil
import sysconfig
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mpdemo.cuts import block_names, check_split, resolve_cut
from mpdemo.errors import UserError, one_line_errors
from mpdemo.options import option_name
from mpdemo.schedules import PLAIN, SCHEDULES, check_schedule, usual_stages_per_rank

Rung = Literal["single", "data_parallel", "ddp", "model_parallel", "pipeline", "hybrid", "fsdp", "tensor"]
Form = Literal["one-process", "per-device"]
Model = Literal["toy", "convnet", "resnet18", "resnet50", "resnet101", "transformer", "convstack"]
Norm = Literal["batch", "group"]
Dataset = Literal["digits", "mnist", "imagenet", "folder"]
Optimizer = Literal["sgd", "adamw"]
Count = Annotated[int, Field(ge=1)]


def _library_name(text):
    return PLAIN.get(str(text).lower().replace("-", ""), text)


Schedule = Annotated[Literal[tuple(SCHEDULES)], BeforeValidator(_library_name)]  # without regard to case and hyphens

RUNGS, MODELS, NORMS, DATASETS = map(get_args, (Rung, Model, Norm, Dataset))
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
SHARING_RUNGS = ("data_parallel", "ddp", "fsdp")  # every device takes a share of the batch
CUT_RUNGS = ("model_parallel", "pipeline", "hybrid")  # no device holds the whole model
LINEAR = ("toy", "transformer")  # models without convolutions, but for the one that embeds the patches


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
    steps: Count | None = setting(None, "stop after this many steps; with --epochs: earlier, in the same training")
    optimizer: Optimizer = setting("sgd", "what updates the weights: SGD with momentum 0.9, or AdamW")
    lr: Annotated[float, Field(gt=0)] | None = setting(None, "learning rate (default: 0.01 with sgd, 0.001 with adamw)")
    warmup_steps: int = Field(0, ge=0, description="first steps, over which the learning rate grows to --lr")
    lr_schedule: Literal["constant", "cosine"] = setting(
        "constant", "learning rate after the warm-up: --lr, or along a half cosine to 0 at the end of all --epochs"
    )
    seed: int = setting(0, "of the initial weights and of the order of the images")
    processes: Count | None = setting(None, "outside torchrun and Slurm: how many to start (default: 2; hybrid: 4)")
    oversubscribe: bool = setting(False, "start more processes than there are CPU cores, or than memory allows")
    devices: Count | None = setting(None, "how many devices a one-process form drives (default: 2)")
    replicas: Count | None = setting(None, "copies of the cut or split model (default: 2 of rung hybrid, 1 of tensor)")
    mesh: Literal["dp-pp", "pp-dp"] = setting(
        "dp-pp", "of rung hybrid: neighbouring ranks differ in the last one, so dp-pp keeps a replica in a node"
    )
    sharded: bool = setting(False, "of rung hybrid: the replicas divide every stage among them, as FSDP does")
    reshard: Literal["always", "never"] = setting(
        "always", "of rung fsdp: drop a block's gathered weights after its forward pass, or keep them for its backward"
    )
    sequence_parallel: bool = setting(False, "of rung tensor: also split the tokens, between the layers that are split")
    microbatches: Count | None = setting(
        None, "parts of a process's share, one after the other or down a pipeline (default: 1; pipelines: 4 per device)"
    )
    schedule: Schedule = setting("1F1B", "of a pipeline with one process per device: what a device computes when")
    cut: str | None = setting(None, "last block of each stage but the last: names or numbers, separated by commas")
    precision: Literal["fp32", "bf16"] = setting("fp32", "type that autocast computes in")
    activation_checkpointing: bool = setting(False, "keep only each block's input, and compute the block twice")
    channels_last: bool = setting(False, "keep the channels of a pixel side by side (convolutional models)")
    compile: bool = setting(False, "compile every block in the first step (needs a C++ compiler)")
    out: str = setting("runs/train", "run folder: metrics, summary, checkpoints")
    checkpoint_every: Count | None = setting(None, "steps between checkpoints (default: none is written)")
    resume: str | None = setting(None, "run folder whose newest checkpoint to resume; auto: --out, if it has one")
    workers: int = Field(0, ge=0, description="loader processes per rank; with 0 the rank decodes its images itself")
    log_every: Count = setting(10, "steps between two log entries; each waits for the device")
    tensorboard: bool = setting(False, "also write the metrics for TensorBoard, into --out/tensorboard")
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


def require(condition, message):
    """Refuse what a user wrote, with a message, unless the condition holds."""
    if not condition:
        raise UserError(message)


def records_timeline(rung, form) -> bool:
    """Whether a training of this rung and form can record a timeline."""
    return form == "per-device" and rung in CUT_RUNGS


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
    require(s.form in (None, *forms), f"rung {s.rung} has no form {s.form!r}; allowed: {', '.join(forms)}")
    s = replace(
        s,
        form=s.form or forms[0],
        epochs=1 if s.steps is None and s.epochs is None else s.epochs,
        lr=s.lr or LEARNING_RATES[s.optimizer],
        image_size=s.image_size or (28 if s.dataset in ("digits", "mnist") else 224),
    )
    _check_belonging(s)
    _check_savings(s)
    s = _with_grid(s, world_size) if s.rung == "hybrid" or (s.replicas or 1) > 1 else _with_devices(s, world_size)
    return _with_stages(s) if s.rung in ("pipeline", "hybrid") else _with_parts(s)


def _check_belonging(s):
    """Refuse an option of another rung."""
    recorded, hybrid = records_timeline(s.rung, s.form), s.rung == "hybrid"
    require(recorded or not s.timeline, f"--timeline records rungs {', '.join(CUT_RUNGS)} in the form per-device")
    require(hybrid or s.rung == "tensor" or s.replicas is None, "--replicas belongs to --rung hybrid or tensor alone")
    require(hybrid or s.mesh == "dp-pp", "--mesh belongs to --rung hybrid alone")
    require(hybrid or not s.sharded, "--sharded belongs to --rung hybrid alone")
    require(s.replicas != 1 or not s.sharded, "--sharded divides stages among replicas; allowed: --replicas 2 or more")
    require(s.rung == "fsdp" or s.reshard == "always", f"--reshard {s.reshard} belongs to --rung fsdp alone")
    require(s.rung == "tensor" or not s.sequence_parallel, "--sequence-parallel belongs to --rung tensor alone")


def _check_savings(s):
    """Refuse what saves memory or time where it cannot be combined with the rung, the model or the schedule."""
    require(
        not (s.channels_last and s.model in LINEAR),
        f"--channels-last is a memory layout for convolutions, of no use to model {s.model}; leave it out",
    )
    shards = "--sharded" if s.sharded else "--rung fsdp"
    require(
        not (s.channels_last and (s.rung == "fsdp" or s.sharded)),
        f"--channels-last does not go with {shards}, which shards weights that lie row by row",
    )
    require(
        not (s.compile and s.rung == "data_parallel"),
        "--compile does not reach the copies that data_parallel makes in every step; use --rung ddp",
    )
    if s.form == "per-device" and s.rung in ("pipeline", "hybrid") and SCHEDULES[s.schedule].splits_backward:
        # a block, or its compiled backward pass, would be computed anew for each part; FSDP would miss the gradients
        whole = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.splits_backward)
        for name in ("activation_checkpointing", "compile", "sharded"):
            require(
                not getattr(s, name),
                f"{option_name(name)} does not go with --schedule {s.schedule}, which splits the backward pass of "
                f"every block; allowed: {whole}",
            )


def _started(s, world_size) -> int | None:
    """Return how many processes there are by the launcher or by the settings; None where neither says it."""
    require(
        world_size is None or s.processes in (None, world_size),
        f"--processes {s.processes} contradicts the launcher's {world_size} processes; leave it out",
    )
    return world_size or s.processes


def _with_devices(s, world_size):
    """Settle the number of processes and of devices of a rung without replicas of a cut model."""
    if s.form == "per-device":
        count = _started(s, world_size) or 2
        return replace(s, processes=count, devices=count)
    started = world_size if world_size is not None else s.processes
    more = "" if s.rung == "single" else " (and say --devices for how many devices it drives)"
    require(
        started in (None, 1),
        f"rung {s.rung} in the one-process form was started as {started} processes; start 1{more}",
    )
    return replace(s, processes=1, devices=1 if s.rung == "single" else s.devices or 2)


def _with_grid(s, world_size):
    """Settle processes, replicas, and the devices of each replica; a grid has one process per device."""
    replicas = s.replicas or 2
    processes = _started(s, world_size) or replicas * (s.devices or 2)
    require(
        processes % replicas == 0 and processes > replicas,
        f"{processes} processes do not make {replicas} replicas of 2 or more devices each; "
        f"allowed: a multiple of {replicas} from {2 * replicas} on, or another --replicas",
    )
    require(
        s.batch_size % replicas == 0,
        f"--batch-size {s.batch_size} (all processes together) does not divide by {replicas} replicas; "
        f"allowed: a multiple of {replicas}, such as {max(1, s.batch_size // replicas) * replicas}",
    )
    return replace(s, processes=processes, replicas=replicas, devices=processes // replicas)


def _with_parts(s):
    """Settle the parts whose gradients are accumulated, and refuse a batch that does not divide."""
    parts, shares = s.microbatches or 1, s.devices if s.rung in SHARING_RUNGS else s.replicas or 1
    if s.rung == "tensor":
        check_split(s.model, s.image_size, s.devices, s.sequence_parallel)
    require(
        parts == 1 or s.rung != "model_parallel",
        f"rung model_parallel takes no --microbatches {parts}: with them it is --rung pipeline",
    )
    if s.rung == "model_parallel":
        resolve_cut(block_names(s.model), s.cut, s.devices)
    divisor = shares * parts
    over = f"{shares} devices" if parts == 1 else f"{parts} microbatches" + (f" on {shares} devices" * (shares > 1))
    require(
        s.batch_size % divisor == 0,
        f"--batch-size {s.batch_size} (all processes together) does not divide by {over}; "
        f"allowed: a multiple of {divisor}, such as {max(1, s.batch_size // divisor) * divisor}",
    )
    return replace(s, microbatches=parts)


def _with_stages(s):
    """Settle the microbatches of a pipeline, or of each replica of one; one process runs GPipe's order."""
    share = s.batch_size // (s.replicas or 1)
    schedule = "GPipe" if s.form == "one-process" else s.schedule
    parts = s.microbatches or next((m for m in (4 * s.devices, 2 * s.devices) if share % m == 0), s.devices)
    check_schedule(schedule, s.devices, parts, share)
    require(
        parts >= s.devices,
        f"{parts} microbatches are fewer than the {s.devices} devices, so some would never work; "
        f"allowed: {s.devices} or more, or --rung model_parallel",
    )
    resolve_cut(block_names(s.model), s.cut, s.devices * usual_stages_per_rank(schedule))
    return replace(s, schedule=schedule, microbatches=parts)


def check_compiler():
    """Refuse to compile where there is no C++ compiler, or no header of Python for what it compiles."""
    compiler = os.environ.get("CXX", "g++")
    require(
        shutil.which(compiler),
        f"--compile needs a C++ compiler, {compiler} is not found; install g++ or set CXX to another",
    )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    require(header.exists(), f"--compile needs {header}; install Python's development files, or leave it out")
