"""Every setting of a training run, said once and checked once: type, unit, what is allowed, default. Needs no PyTorch.

The command line of every rung is made from this class. Its defaults are those of the course model, a vision transformer
of eight equal blocks that learns the digits: the same run with every strategy, so that the runs can be compared.
"""

import os
from dataclasses import replace
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mpdemo.errors import UserError, one_line_errors
from mpdemo.options import option_name
from mpdemo.settings.cuts import DEPTH, block_names, check_split, resolve_cut
from mpdemo.settings.schedules import SCHEDULES, check_schedule, schedule_name, usual_stages_per_rank

Rung = Literal["single", "data_parallel", "ddp", "model_parallel", "pipeline", "hybrid", "fsdp", "tensor"]
Form = Literal["one-process", "per-device"]
Model = Literal["toy", "convnet", "resnet18", "resnet50", "resnet101", "transformer", "convstack"]
Norm = Literal["batch", "group"]
Dataset = Literal["digits", "mnist", "imagenet", "folder"]
Count = Annotated[int, Field(ge=1, le=10**9)]
Pixels = Annotated[int, Field(ge=1, le=4096)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _path(text):
    if not text.strip() or "\0" in text or max(map(len, os.fsencode(text).split(b"/"))) > 255:
        raise ValueError("allowed: a path that is not empty, of names of at most 255 bytes")
    return text


PathName = Annotated[str, AfterValidator(_path)]
Schedule = Annotated[Literal[tuple(SCHEDULES)], BeforeValidator(schedule_name)]

RUNGS, MODELS, NORMS = map(get_args, (Rung, Model, Norm))
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


def setting(default, description):
    """Declare one setting."""
    return Field(default, description=description)


@one_line_errors(option_name)
@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings:
    """What to train, how, and where to write it. `checked` fills in what is None."""

    rung: Rung = Field(description="how the training is spread over devices")
    form: Form | None = setting(None, "one process drives all devices, or one process per device")
    model: Model = setting("transformer", "the network")
    norm: Norm = setting("batch", "normalisation of convolutional models")
    dataset: Dataset = setting("digits", "what to train on; digits ships with the package")
    data: PathName | None = setting(None, "folder of the data set (default: MPDEMO_DATA)")
    image_size: Pixels | None = setting(
        None, "pixels per side (default: 28 for digits and mnist, else 224)"
    )
    batch_size: Count = setting(64, "images per step, over all processes together")
    epochs: Count | None = setting(None, "passes over the training images (default: 2, without --steps)")
    steps: Count | None = setting(None, "stop after this many steps, or after --epochs if that is earlier")
    optimizer: Literal["sgd", "adamw"] = setting(
        "adamw", "what updates the weights: SGD with momentum 0.9, or AdamW"
    )
    lr: Rate = setting(0.001, "highest learning rate; after the warm-up it falls as half a cosine to 0")
    warmup_steps: int | None = Field(
        None,
        ge=0,
        le=10**9,
        description="first steps, in which the rate grows (default: 10, or half of all)",
    )
    seed: int = Field(
        0, ge=0, lt=2**32, description="of the initial weights and of the order of the images"
    )
    devices: Count | None = setting(None, "how many devices a one-process form drives (default: 2)")
    replicas: Count | None = setting(None, "of rung hybrid: copies of the cut model (default: 2)")
    sharded: bool = setting(
        False, "of rung hybrid: the replicas divide every stage among them, as FSDP does"
    )
    microbatches: Count | None = setting(
        None,
        "parts of a process's share, one after the other or down a pipeline (default: 1; pipelines: 2 per device)",
    )
    schedule: Schedule = setting("Interleaved1F1B", "of a pipeline: what a device computes when")
    cut: str | None = setting(
        None, "last block of each stage but the last: names or numbers, separated by commas"
    )
    out: PathName | None = setting(None, "run folder: metrics, summary (default: runs/train_RUNG)")
    log_every: Count = setting(10, "steps between two log entries; each waits for the device")
    timeline: bool = setting(False, "record what each rank did when (per-device forms of a cut model)")


def checked(settings: Settings, world_size: int | None = None) -> Settings:
    """Return the settings with all defaults that depend on others; refuse what cannot work together.

    `world_size` is the number of processes that a launcher has started, None where there is no launcher.
    """
    s, forms = settings, RUNG_FORMS[settings.rung]
    if s.form not in (None, *forms):
        raise UserError(f"rung {s.rung} has no form {s.form!r}; allowed: {', '.join(forms)}")
    s = replace(
        s,
        form=s.form or forms[0],
        epochs=2 if s.steps is None and s.epochs is None else s.epochs,
        image_size=s.image_size or (28 if s.dataset in ("digits", "mnist") else 224),
        out=s.out or f"runs/train_{s.rung}",
    )
    s = _with_devices(s, world_size)
    _check_belonging(s)
    return _with_stages(s) if s.rung in ("pipeline", "hybrid") else _with_parts(s)


def records_timeline(s) -> bool:
    """Whether a run of these settings, checked or not, can record a timeline."""
    return is_per_device(s) and s.rung in CUT_RUNGS


def is_per_device(s) -> bool:
    """Whether these settings, checked or not, ask for one process per device."""
    return (s.form or RUNG_FORMS[s.rung][0]) == "per-device"


def _check_belonging(s):
    """Refuse an option of another rung or form."""
    for name, given in (("replicas", s.replicas > 1), ("sharded", s.sharded)):
        if given and s.rung != "hybrid":
            raise UserError(f"{option_name(name)} belongs to rung hybrid alone")
    if s.timeline and not records_timeline(s):
        raise UserError(f"--timeline records rungs {', '.join(CUT_RUNGS)} in the form per-device")
    if s.sharded and s.replicas == 1:
        raise UserError("--sharded divides stages among replicas; allowed: --replicas 2 or more")
    if s.sharded and SCHEDULES[s.schedule].splits_backward:  # FSDP would miss the gradients of a part
        whole = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.splits_backward)
        splits = f"--schedule {s.schedule}, which splits the backward pass of every block"
        raise UserError(f"--sharded does not go with {splits}; allowed: {whole}")


def _with_devices(s, world_size):
    """Settle the number of replicas and of devices, of a hybrid those of each replica."""
    if not is_per_device(s):
        if world_size not in (None, 1):
            more = "" if s.rung == "single" else " (and say --devices for how many devices it drives)"
            started = f"was started as {world_size} processes; start 1{more}"
            raise UserError(f"rung {s.rung} in the one-process form {started}")
        return replace(s, replicas=s.replicas or 1, devices=1 if s.rung == "single" else s.devices or 2)
    hybrid = s.rung == "hybrid"
    if world_size is None:
        launch = f"torchrun --standalone --nproc-per-node {4 if hybrid else 2} -m mpdemo.rungs.{s.rung}"
        raise UserError(
            f"rung {s.rung} has one process per device, and this is one alone; start them by {launch}"
        )
    replicas = s.replicas or (2 if hybrid else 1)
    if hybrid and (world_size % replicas or world_size == replicas):
        allowed = f"a multiple of {replicas} from {2 * replicas} on, or another --replicas"
        many = f"{replicas} replicas of 2 or more devices each"
        raise UserError(f"{world_size} processes do not make {many}; allowed: {allowed}")
    if hybrid:
        _check_divides(s, replicas, f"{replicas} replicas")
    return replace(s, replicas=replicas, devices=world_size // replicas if hybrid else world_size)


def _check_divides(s, divisor, parts):
    """Refuse a batch that does not come out in equal parts."""
    if s.batch_size % divisor:
        allowed = f"a multiple of {divisor}, such as {max(1, s.batch_size // divisor) * divisor}"
        batch = f"--batch-size {s.batch_size} (all processes together)"
        raise UserError(f"{batch} does not divide by {parts}; allowed: {allowed}")


def _with_parts(s):
    """Settle the parts whose gradients are accumulated, and refuse a batch that does not divide."""
    parts, shares = s.microbatches or 1, s.devices if s.rung in SHARING_RUNGS else 1
    if s.rung == "tensor":
        check_split(s.model, s.devices)
    if s.rung == "model_parallel":
        if parts > 1:
            raise UserError(
                f"rung model_parallel takes no --microbatches {parts}: with them it is rung pipeline"
            )
        s = _with_cut(s, s.devices)
    on = f" on {shares} devices" if shares > 1 else ""
    _check_divides(s, shares * parts, f"{shares} devices" if parts == 1 else f"{parts} microbatches{on}")
    return replace(s, microbatches=parts)


def _with_stages(s):
    """Settle microbatches and cut of a pipeline, or of each replica of one; one process runs GPipe's order."""
    share = s.batch_size // s.replicas
    schedule = s.schedule if is_per_device(s) else "GPipe"
    parts = s.microbatches or (2 * s.devices if share % (2 * s.devices) == 0 else s.devices)
    check_schedule(schedule, s.devices, parts, share)
    if parts < s.devices:
        few = f"{parts} microbatches are fewer than the {s.devices} devices, so some would never work"
        raise UserError(f"{few}; allowed: {s.devices} or more, or rung model_parallel")
    return _with_cut(
        replace(s, schedule=schedule, microbatches=parts), s.devices * usual_stages_per_rank(schedule)
    )


def _with_cut(s, stages):
    """Settle where the model is cut: into stages of equally many of its equal blocks, where they divide."""
    equal = s.model in ("transformer", "convstack") and DEPTH % stages == 0
    s = replace(s, cut=s.cut or (equal_cut(stages) if equal else None))
    resolve_cut(block_names(s.model), s.cut, stages)
    return s


def equal_cut(stages) -> str:
    """Cut the transformer's eight blocks into equal stages (2, 4 or 8), as ``--cut`` takes it."""
    return ",".join(f"block.{DEPTH * number // stages - 1}" for number in range(1, stages))
