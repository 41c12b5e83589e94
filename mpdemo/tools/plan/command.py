"""``mpdemo plan``: which strategies fit on so many devices, and what each of them would take.

    mpdemo plan --model resnet101 --devices 8 --nodes 2 --batch 128 --gpu a100
    mpdemo plan --model package.module:function --input 3,224,224 --devices 8 --gpu-memory 16GiB

No GPU is needed, and no model is trained. Taught in notebooks/72_which_one.ipynb.
"""

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic.dataclasses import dataclass

from mpdemo import foreign
from mpdemo.errors import UserError, did_you_mean, error_line, one_line_errors, printable
from mpdemo.options import add_options, option_name, options_from
from mpdemo.settings import MODELS, NORMS, Count, Pixels
from mpdemo.tools.plan import strategies
from mpdemo.tools.plan.efficiency import COMPILED, known_of
from mpdemo.tools.plan.gpus import GPUS
from mpdemo.tools.plan.request import BILLION_UPDATES, CORES, PRECISIONS, PlanRequest, mib
from mpdemo.tools.plan.roof import MIB, OPTIMIZERS, RESERVE
from mpdemo.tools.terminal import Progress, wrapped

OF_COURSE = "image_size", "channels", "classes", "norm"  # options of a model of the course
OF_OWN = "input", "tokens"
TO_TRAIN = (
    "to train so: notebooks/scripts/train_gpt.py takes the flags of a row; it is plain PyTorch with a GPT, which you "
    "replace by your model. finetune_lora.py has LoRA, and train_ddp.py is a smaller script to begin with"
)


def _known_model(name):
    if name not in MODELS and ":" not in name:
        raise ValueError(
            f"allowed: {', '.join(MODELS)}, or package.module:function{did_you_mean(name, MODELS)}"
        )
    return name


def _shape(text):
    sizes = text.split(",")
    if not all(map(str.isdecimal, sizes)) or not 0 < prod(map(int, sizes)) < 2**40:
        raise ValueError(
            "allowed: whole numbers above 0 with commas, such as 3,224,224, of fewer than 2**40 values"
        )
    return tuple(map(int, sizes))


def _with_unit(size):
    if isinstance(size, str) and size.strip().replace(".", "", 1).isdecimal():
        raise ValueError("allowed: a number and a unit, such as 16GiB")
    return size


def _total(text):
    parts = str(text).split("x")
    try:
        total = prod(map(float, parts))
    except ValueError:
        total = 0.0
    if not (1 <= total < float("inf") and len(parts) <= 2):
        raise ValueError(
            "allowed: how many tokens or images, such as 300e9, or epochs x images, such as 90x1281167"
        )
    return total


@one_line_errors(option_name)
@dataclass(frozen=True, config={"extra": "forbid"})
class PlanOptions:
    """What to plan: the options of ``mpdemo plan``."""

    model: Annotated[str, AfterValidator(_known_model)] = Field(
        "resnet101", description="as for train; or your own, as package.module:function, with --input"
    )
    input: Annotated[str, AfterValidator(_shape)] | None = Field(
        None, description="shape of a sample of your own model: 3,224,224"
    )
    tokens: bool = Field(
        False, description="the samples of your own model are whole numbers, for an embedding"
    )
    devices: int | None = Field(None, ge=1, le=10**5, description="how many there are")
    nodes: int = Field(1, ge=1, description="nodes that they are in")
    batch: Count = Field(128, description="samples of a step, of all devices together")
    image_size: Pixels = Field(224, description="pixels per side")
    channels: Count = Field(3, description="of the images")
    classes: Count = Field(1000, description="of the data set")
    norm: Literal[NORMS] = Field("batch", description="normalisation of the convolutional models")
    gpu: Literal[tuple(GPUS)] | None = Field(
        None,
        description="what the devices are: says their memory, and estimates times from their data sheet",
    )
    gpu_memory: Annotated[ByteSize, BeforeValidator(_with_unit)] | None = Field(
        None, description="of one device, such as 16GiB, where it is another one's than --gpu's"
    )
    optimizer: Literal[tuple(OPTIMIZERS)] = Field("sgd", description="for its memory and its time")
    precision: Literal[tuple(PRECISIONS)] | None = Field(
        None, description="in which all strategies compute; without it bf16, or autocast on one device"
    )
    total: Annotated[float, BeforeValidator(_total)] | None = Field(
        None,
        description="tokens or images of the whole run, 300e9, or epochs x images, 90x1281167: tells GPU hours",
    )
    price: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="of a GPU hour, for that of the run"
    )
    record: str | None = Field(
        None,
        description="what kernels reach of the data sheet: a record of make gpu-record, or a torch.profiler trace",
    )
    compile: bool = Field(False, description="plan steps that torch.compile compiles, which keep less")
    all: bool = Field(False, description="also print what another strategy beats in memory and in time")
    json: str | None = Field(None, description="also write the rows to this file")

    @property
    def own_model(self):
        """Whether the model is the reader's, as package.module:function."""
        return ":" in self.model


def check_together(options, given):
    """Refuse options that are missing, and those that have no meaning with others that were given."""
    wrong = OF_COURSE if options.own_model else OF_OWN
    for name in [name for name in wrong if name in given]:
        whose = "of the course" if options.own_model else "of your own, package.module:function"
        raise UserError(f"{option_name(name)} is for a model {whose}; leave it out")
    if options.devices is None:
        raise UserError("--devices is missing; say how many devices there are, such as --devices 8")
    if options.price is not None and options.total is None:
        raise UserError("--price is that of a whole run; say how long it is, such as --total 300e9")
    if options.gpu is None and options.gpu_memory is None:
        raise UserError(
            f"--gpu is missing; say what the devices are, {', '.join(GPUS)}, or how large, such as --gpu-memory 16GiB"
        )
    if options.gpu_memory is not None and options.gpu_memory <= RESERVE:
        raise UserError(
            "--gpu-memory is no more than CUDA itself takes; allowed: 1GiB or more, with the unit, such as 16GiB"
        )


def add_arguments(parser):
    """Declare the arguments of ``mpdemo plan``."""
    add_options(parser, PlanOptions)


def main(args) -> int:
    """Print a plan; return the exit status."""
    options = options_from(args, PlanOptions)
    check_together(options, vars(args))
    if options.json:  # now, and not after what may take a minute
        with foreign.faults(f"--json {options.json!r} can't be written"):
            foreign.try_to_write(Path(options.json))
    try:
        with Progress() as progress:
            text, rows = answer(options, progress)
    except SystemExit as error:  # of the reader's own code, where it computes
        raise UserError(
            f"--model {options.model} ends the process ({error_line(error)}); allowed: one that returns"
        ) from None
    print(text)
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


def answer(options, progress) -> tuple:
    """Return what comes first, why, a table of all strategies and notes, as text; and the rows of the table."""
    progress(f"planning: building {options.model}")
    request = request_of(options, lambda strategy: progress(f"planning: {strategy}"))
    rows = strategies.compare(request)
    shown = strategies.shown(request, rows)
    lines = [wrapped(strategies.recommended(request, rows)), "", strategies.table(request, shown)]
    lines += [wrapped(f"note: {note}") for note in notes(request, rows)]
    text = "\n".join([*lines, "", wrapped(TO_TRAIN)])
    # names and errors of a reader's model are in it
    return printable(text), strategies.as_rows(request, rows)


def notes(request, rows) -> list:
    """Return what a plan assumes, what the reader should know of it, and why some rows are not planned."""
    sheet, (best, *_) = GPUS[request.gpu], rows
    found = [
        f"a batch of {request.batch:,} samples is that of all devices together; optimizer {request.optimizer}; "
        f"{request.model.described()}",
        *(f"{name}: {PRECISIONS[name]}" for name in dict.fromkeys(row.rule.precision for row in rows)),
        f"a device has {mib(request.memory)}, of which {RESERVE // MIB} MiB are CUDA's; times are estimated from the "
        f"data sheet of {request.gpu} ({sheet.source}); {request.efficiency.basis}",
        f"compiled: torch.compile fuses memory-bound kernels, which then take {COMPILED:.0%} of their time, as in a "
        "GPT on an H100; so may kernels that are fused by hand",
        "runs: with how many published runs such rows were compared. A time that was compared with none has no "
        "interval, and may be off by more. The order of the strategies is estimated as well: time the first two",
    ]
    if best.fits != "no" and (most := best.predicted.most()):
        found.append(f"the largest batch that fits with {best.answer}: {most:,} samples")
    for row in [row for row in strategies.shown(request, rows) if row.fits == "perhaps"]:
        fused = row.predicted.fused
        what = f"{mib(fused)} if its kernels are fused, as by torch.compile" if fused else (
            "it is within 5 % of the limit, and peaks that a GPU measured were up to 4.3 % off")  # fmt: skip
        found.append(f"{row.answer} perhaps fits: {what}")
    of_hosts = {}
    for row in [row for row in rows if row.predicted and row.predicted.moved]:
        of_hosts.setdefault(_of_host(row.predicted), []).append(row.answer)
    found += [f"{' and '.join(answers)}: {told}" for told, answers in of_hosts.items()]
    found += request.model.notes
    if request.model.channels_first and "bf16" in sheet.peaks:
        found.append(
            "times are those of channels-last convolutions, as tensor cores want them: convert model and images "
            "with .to(memory_format=torch.channels_last). Channels-first, a ResNet-50 on an H100 took 1.8 times as long"
        )
    if request.optimizer == "adamw":
        found.append(
            "adamw is PyTorch's default (foreach): its update takes the memory of the weights once more, and three "
            "times as long as that of AdamW(fused=True), which is --optimizer adamw-fused"
        )
    if request.devices > 1:
        found.append(
            "tensor parallelism splits no embedding and no output layer; a pipeline's memory is a sum over blocks"
        )
    reasons = dict.fromkeys(row.reason for row in rows if row.reason)
    for reason in reasons:
        meshes = dict.fromkeys(row.rule.mesh for row in rows if row.reason == reason)
        found.append(f"not planned: {', '.join(meshes)}: {reason}")
    if not request.everything:
        found.append(
            "what another strategy beats in memory and in time is left out; --all prints it, and float32"
        )
    return found


def _of_host(found) -> str:
    """Return what a row with offload needs of the host, and what is assumed of it."""
    return (
        f"a step moves {found.moved / 1e9:,.1f} GB between a device and its host: at least "
        f"{1000 * found.least:,.0f} ms, and keeps {found.on_host / 1e9:,.0f} GB in the memory of each node's host. The "
        f"update there adds {1000 * found.updating:,.0f} ms, if the ranks of a node share {CORES} cores and each core "
        f"takes {BILLION_UPDATES} s per billion parameters, as one of ours with AdamW(fused=True). No such host was "
        "measured; its memory may be slower, and torchrun gives each rank one core unless OMP_NUM_THREADS says more"
    )


def request_of(options, progress) -> PlanRequest:
    """Return the options as a request; the model is built, or imported, and tried."""
    from mpdemo.tools.plan.loading import of_course
    from mpdemo.tools.plan.own_model import OwnModel
    from mpdemo.tools.plan.records import efficiency_of

    gpu = options.gpu or "a100"
    efficiency = efficiency_of(options.record, gpu) if options.record else known_of(gpu)
    if options.own_model:
        model = OwnModel(options.model, options.input, options.tokens)
    else:
        images = {name: getattr(options, name) for name in OF_COURSE}
        shape = options.channels, options.image_size, options.image_size
        model = OwnModel(options.model, shape, function=partial(of_course, options.model, **images))
    same = {
        name: getattr(options, name)
        for name in ("batch", "devices", "nodes", "optimizer", "total", "price", "precision")
    } | {"compiled": options.compile, "everything": options.all}
    memory = options.gpu_memory or GPUS[gpu].memory
    return PlanRequest(model, memory=memory, gpu=gpu, efficiency=efficiency, progress=progress, **same)
