"""``python -m mpdemo plan``: where to cut a model, which schedule, how many microbatches, and whether it fits.

    python -m mpdemo plan --model resnet101 --stages 2 --batch 128 --image-size 224 --gpu-memory 16GiB
    python -m mpdemo plan --model resnet101 --stages 2 --batch 128 --image-size 224 --cost v100 --schedule 1F1B
    python -m mpdemo plan --model resnet101 --devices 8 --nodes 2 --batch 128 --gpu-memory 16GiB     which rung to use
    python -m mpdemo plan --model package.module:function --input 3,224,224 --devices 8 --gpu-memory 16GiB

No GPU is needed, and no model is trained; ``--cost measure`` does a few steps on random images. Taught in
notebooks/05_pipeline.ipynb and 11_which_one.ipynb.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic.dataclasses import dataclass

from mpdemo.errors import UserError, did_you_mean, error_line, one_line_errors
from mpdemo.options import add_options, option_name, options_from
from mpdemo.plan import advice, report
from mpdemo.plan.footprint import ROOFS
from mpdemo.plan.report import make_plan
from mpdemo.plan.subject import RESERVE, STATES
from mpdemo.settings import MODELS, NORMS, Count, Pixels, Schedule

OF_STAGES = "stages", "schedule", "microbatches", "cut"  # options of a plan for one pipeline
OF_DEVICES = "nodes", "input", "tokens"
OF_COURSE = "image_size", "channels", "classes", "norm"
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
class Request:
    """What to plan: the options of ``python -m mpdemo plan``."""

    model: Annotated[str, AfterValidator(_known_model)] = Field(
        "resnet101", description="as for train; or your own, as package.module:function, with --input and --devices"
    )
    input: Annotated[str, AfterValidator(_shape)] | None = Field(
        None, description="shape of a sample of your own model: 3,224,224"
    )
    tokens: bool = Field(False, description="the samples of your own model are whole numbers, for an embedding")
    stages: int = Field(2, ge=2, description="devices to cut the model over")
    devices: int | None = Field(None, ge=1, le=10**5, description="compare all rungs on so many; needs --gpu-memory")
    nodes: int = Field(1, ge=1, description="nodes that they are in (with --devices)")
    batch: Count = Field(128, description="samples of the whole batch")
    image_size: Pixels = Field(224, description="pixels per side")
    channels: Count = Field(3, description="of the images")
    classes: Count = Field(1000, description="of the data set")
    norm: Literal[NORMS] = Field("batch", description="normalisation of the convolutional models")
    gpu_memory: Annotated[ByteSize, BeforeValidator(_with_unit)] | None = Field(
        None, description="of one device, such as 16GiB; no limit by default"
    )
    schedule: Schedule | None = Field(None, description="only this one; all by default")
    microbatches: int | None = Field(None, ge=1, description="only this number of microbatches")
    cut: str | None = Field(None, description="only this cut, as for train: layer2.3 or 8")
    optimizer: Literal[tuple(STATES)] = Field("sgd", description="for its memory")
    cost: Literal["measure", *ROOFS] = Field(
        "a100", description="estimate times for this GPU, or measure steps on this machine (with --devices)"
    )
    budget: float = Field(60.0, ge=0, le=86400, description="seconds after which nothing more is measured")
    json: str | None = Field(None, description="also write the rows to this file")

    @property
    def own_model(self):
        """Whether the model is the reader's, as package.module:function."""
        return ":" in self.model


def check_together(request, given):
    """Refuse options that have no meaning with others that were given."""
    refused = {} if request.own_model else dict.fromkeys(OF_OWN, "is for a model of your own, package.module:function")
    refused |= dict.fromkeys(OF_STAGES, "is for a plan with --stages") if request.devices else {}
    refused |= {} if request.devices else dict.fromkeys(OF_DEVICES, "belongs to --devices")
    refused |= dict.fromkeys(OF_COURSE, "is for a model of the course") if request.own_model else {}
    refused |= {"budget": f"is for --cost measure, not {request.cost}"} if request.cost != "measure" else {}
    for name, why in refused.items():
        if name in given:
            raise UserError(f"{option_name(name)} {why}; leave it out")
    memory = request.gpu_memory
    for wrong, message in (
        (request.own_model and not request.devices, "a model of your own is planned with --devices and --gpu-memory"),
        (request.devices and memory is None, "--devices needs --gpu-memory, that of one device, such as 16GiB"),
        (memory is not None and memory <= RESERVE, "--gpu-memory is no more than CUDA itself takes; allowed: 1GiB or "
         "more, with the unit, such as 16GiB"),
        (request.cost == "measure" and (not request.devices or request.nodes > 1), "--cost measure measures steps "
         "in one node, with --devices; allowed: --cost v100"),
    ):  # fmt: skip
        if wrong:
            raise UserError(message)


def add_arguments(parser):
    """Declare the arguments of ``mpdemo plan``."""
    add_options(parser, Request)


def main(args) -> int:
    """Print a plan; return the exit status."""
    request = options_from(args, Request)
    check_together(request, vars(args))
    try:
        text, rows = advice.answer(request) if request.devices else report.answer(make_plan(request))
    except Exception as error:
        if isinstance(error, UserError) or not request.own_model:
            raise
        what = f"--model {request.model} cannot be planned: it fails without real numbers"
        raise UserError(f"{what} ({error_line(error)}); try the part that takes and returns tensors") from error
    print(text)
    if request.json:
        try:
            Path(request.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json {request.json} cannot be written: {error.strerror}") from None
    return 0


def plan(**options):
    """Return the `Plan` for options of ``python -m mpdemo plan --stages``: ``plan(model="resnet101", stages=2)``."""
    return make_plan(Request(**options))
