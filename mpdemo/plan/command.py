"""``python -m mpdemo plan``: which strategy to use on so many devices, and what every other one would take.

    python -m mpdemo plan --model resnet101 --devices 8 --nodes 2 --batch 128 --gpu-memory 16GiB
    python -m mpdemo plan --model package.module:function --input 3,224,224 --devices 8 --gpu-memory 16GiB

No GPU is needed, and no model is trained. Taught in notebooks/11_which_one.ipynb.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic.dataclasses import dataclass

from mpdemo.errors import UserError, did_you_mean, error_line, one_line_errors
from mpdemo.options import add_options, as_arguments, option_name, options_from
from mpdemo.plan import strategies
from mpdemo.plan.choose import choose
from mpdemo.plan.footprint import ROOFS
from mpdemo.plan.request import MIB, RESERVE, STATES, PlanRequest
from mpdemo.settings import MODELS, NORMS, Count, Pixels

OF_COURSE = "image_size", "channels", "classes", "norm"  # options of a model of the course
OF_OWN = "input", "tokens"


def _known_model(name):
    if name not in MODELS and ":" not in name:
        raise ValueError(f"allowed: {', '.join(MODELS)}, or package.module:function{did_you_mean(name, MODELS)}")
    return name


def _shape(text):
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise ValueError("allowed: whole numbers above 0 with commas, such as 3,224,224")
    return text


def _with_unit(size):
    if isinstance(size, str) and size.strip().replace(".", "", 1).isdecimal():
        raise ValueError("allowed: a number and a unit, such as 16GiB")
    return size


@one_line_errors(option_name)
@dataclass(frozen=True, config={"extra": "forbid"})
class PlanOptions:
    """What to plan: the options of ``python -m mpdemo plan``."""

    model: Annotated[str, AfterValidator(_known_model)] = Field(
        "resnet101", description="as for train; or your own, as package.module:function, with --input"
    )
    input: Annotated[str, AfterValidator(_shape)] | None = Field(
        None, description="shape of a sample of your own model: 3,224,224"
    )
    tokens: bool = Field(False, description="the samples of your own model are whole numbers, for an embedding")
    devices: int | None = Field(None, ge=1, le=10**5, description="how many there are")
    nodes: int = Field(1, ge=1, description="nodes that they are in")
    batch: Count = Field(128, description="samples of the whole batch")
    image_size: Pixels = Field(224, description="pixels per side")
    channels: Count = Field(3, description="of the images")
    classes: Count = Field(1000, description="of the data set")
    norm: Literal[NORMS] = Field("batch", description="normalisation of the convolutional models")
    gpu_memory: Annotated[ByteSize, BeforeValidator(_with_unit)] | None = Field(
        None, description="of one device, such as 16GiB"
    )
    optimizer: Literal[tuple(STATES)] = Field("sgd", description="for its memory")
    cost: Literal[tuple(ROOFS)] = Field("a100", description="the GPU whose data sheet the times are estimated from")
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
    if options.gpu_memory is None:
        raise UserError("--gpu-memory is missing; say that of one device, such as --gpu-memory 16GiB")
    if options.gpu_memory <= RESERVE:
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
    try:
        text, rows = answer(options)
    except Exception as error:
        if isinstance(error, UserError) or not options.own_model:
            raise
        what = f"--model {options.model} cannot be planned: it fails without real numbers"
        raise UserError(f"{what} ({error_line(error)}); try the part that takes and returns tensors") from error
    print(text)
    if options.json:
        try:
            Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json {options.json} cannot be written: {error.strerror}") from None
    return 0


def answer(options) -> tuple:
    """Return what to use, why, a table of all strategies and the commands, as text; and the rows of the table."""
    request = request_of(options)
    choice, rows = choose(request), strategies.compare(request)
    notes = list(getattr(request.model, "notes", []))
    if options.own_model and options.devices > 1:
        notes.append("a model of your own isn't split, so tensor parallelism and pipelines are left out")
    lines = [f"{choice.answer}: {choice.why}", "", strategies.table(request, rows)]
    lines += [
        f"(times estimated for the {request.gpu}, no communication hidden; memory without CUDA's {RESERVE // MIB} MiB)",
        *(f"note: {note}" for note in notes),
        "",
        commands(options, [row for row in rows if row.fits]),
    ]
    return "\n".join(lines).rstrip(), [strategies.as_row(request, row) for row in rows]


def request_of(options) -> PlanRequest:
    """Return the options as a request; a reader's own model is imported and tried."""
    model = options.model
    if options.own_model:
        from mpdemo.models.own import OwnModel

        shape = options.input and tuple(map(int, options.input.split(",")))
        model = OwnModel(options.model, shape, options.tokens)
    names = ("batch", "devices", "nodes", "optimizer", "image_size", "classes", "channels", "norm")
    same = {name: getattr(options, name) for name in names}
    return PlanRequest(model, memory=options.gpu_memory, gpu=options.cost, **same)


def commands(options, rows) -> str:
    """Return the lines that say how to train some strategies."""
    if options.own_model:
        return "to train your own model: notebooks/scripts/train_ddp.py is a whole script, in plain PyTorch"
    lines = []
    for row in rows:
        settings = {
            "model": options.model,
            "rung": row.rung,
            "optimizer": "adamw" if options.optimizer == "adamw" else None,  # the others are train's own SGD
            "norm": options.norm if options.norm != "batch" else None,
            "batch_size": options.batch,
            "image_size": options.image_size,
            **row.predicted.settings,
        }
        lines.append(f"{row.answer}:\n  python -m mpdemo train {' '.join(as_arguments(settings))}")
    return "\n".join(lines)
