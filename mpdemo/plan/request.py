"""What to plan: the options of ``python -m mpdemo plan``, and what cannot go together."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic.dataclasses import dataclass

from mpdemo.errors import UserError, did_you_mean, one_line_errors
from mpdemo.options import option_name
from mpdemo.plan.footprint import ROOFS
from mpdemo.plan.subject import FORMS, STATES
from mpdemo.settings import MODELS, NORMS, Schedule

OF_STAGES = "stages", "schedule", "microbatches", "cut", "form"  # options of a plan for one pipeline
OF_DEVICES = "nodes", "input", "tokens"
OF_COURSE = "image_size", "channels", "classes", "norm"


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
    stages: int = Field(2, ge=1, description="devices to cut the model over")
    devices: int | None = Field(None, ge=1, description="compare all rungs on so many, with --gpu-memory")
    nodes: int = Field(1, ge=1, description="in so many nodes (with --devices)")
    batch: int = Field(128, ge=1, description="samples of the whole batch")
    image_size: int = Field(224, ge=1, description="pixels per side")
    channels: int = Field(3, ge=1, description="of the images")
    classes: int = Field(1000, ge=1, description="of the data set")
    norm: Literal[NORMS] = Field("batch", description="normalisation of the convolutional models")
    gpu_memory: Annotated[ByteSize, BeforeValidator(_with_unit)] | None = Field(
        None, description="of one device, such as 16GiB; no limit by default"
    )
    schedule: Schedule | None = Field(None, description="only this one; all by default")
    microbatches: int | None = Field(None, ge=1, description="only this number of microbatches")
    cut: str | None = Field(None, description="only this cut, as for train: layer2.3 or 8")
    form: Literal[FORMS] = Field("per-device", description="one process per device, or one process for all devices")
    optimizer: Literal[tuple(STATES)] = Field(
        "sgd", description="for its memory, and for the time of its update with --cost measure"
    )
    cost: Literal["measure", *ROOFS] | None = Field(
        None, description="measure on this machine, or estimate for a GPU (default: measure; with --devices: a100)"
    )
    budget: float = Field(60.0, ge=0, le=86400, description="seconds after which nothing more is measured")
    json: str | None = Field(None, description="file to which the plan is written, too")

    @property
    def own_model(self):
        """Whether the model is the reader's, as package.module:function."""
        return ":" in self.model


def check_together(request, given):
    """Refuse options that have no meaning with others that were given."""
    refused = dict.fromkeys(OF_STAGES, "is for a plan with --stages") if request.devices else {}
    refused |= {} if request.devices else dict.fromkeys(OF_DEVICES, "belongs to --devices")
    refused |= dict.fromkeys(OF_COURSE, "is for a model of the course") if request.own_model else {}
    refused |= {"budget": f"is for --cost measure, not {request.cost}"} if request.cost in ROOFS else {}
    for name, why in refused.items():
        if name in given:
            raise UserError(f"{option_name(name)} {why}; leave it out")
    if request.own_model and not request.devices:
        raise UserError("a model of your own is planned with --devices and --gpu-memory")
