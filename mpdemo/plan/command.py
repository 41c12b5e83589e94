"""``python -m mpdemo plan``: where to cut a model, which schedule, how many microbatches, and whether it fits.

    python -m mpdemo plan --model resnet101 --stages 2 --batch 128 --image-size 224 --gpu-memory 16GiB
    python -m mpdemo plan --model resnet101 --stages 2 --batch 128 --image-size 224 --cost v100 --schedule 1F1B
    python -m mpdemo plan --model resnet101 --devices 8 --nodes 2 --batch 128 --gpu-memory 16GiB     which rung to use
    python -m mpdemo plan --model package.module:function --input 3,224,224 --devices 8 --gpu-memory 16GiB

No GPU is needed, and no model is trained; ``--cost measure`` does a few steps on random images. Taught in
notebooks/05_pipeline.ipynb.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ByteSize, Field
from pydantic.dataclasses import dataclass

from mpdemo.cuts import block_names, resolve_cut
from mpdemo.errors import UserError, did_you_mean, one_line_errors
from mpdemo.options import add_options, option_name, options_from
from mpdemo.plan import advice, planner, report
from mpdemo.plan.footprint import ROOFS, estimate, footprints
from mpdemo.plan.machine import measured
from mpdemo.plan.subject import FORMS, MIB, RESERVE, STATES, Subject
from mpdemo.schedules import SCHEDULES, check_schedule, usual_stages_per_rank
from mpdemo.settings import MODELS, NORMS, Schedule


def _known_model(name):
    if name not in MODELS and ":" not in name:
        raise ValueError(f"allowed: {', '.join(MODELS)}, or package.module:function{did_you_mean(name, MODELS)}")
    return name


def _shape(text):
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise ValueError("allowed: whole numbers above 0 with commas, such as 3,224,224")
    return text


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
    gpu_memory: ByteSize | None = Field(None, description="of one device, such as 16GiB; no limit by default")
    schedule: Schedule | None = Field(None, description="only this one; all by default")
    microbatches: int | None = Field(None, ge=1, description="only this number of microbatches")
    cut: str | None = Field(None, description="only this cut, as for train: layer2.3 or 8")
    form: Literal[FORMS] = Field("per-device", description="one process per device, or one process for all devices")
    optimizer: Literal[tuple(STATES)] = Field(
        "sgd", description="for its memory, and for the time of its update with --cost measure"
    )
    cost: Literal["measure", *ROOFS] | None = Field(
        None, description="measure on this machine, or estimate for a GPU (default: measure; with --devices: v100)"
    )
    budget: float = Field(60.0, ge=0, le=86400, description="seconds after which nothing more is measured")
    json: str | None = Field(None, description="file to which the plan is written, too")

    @property
    def own_model(self):
        """Whether the model is the reader's, as package.module:function."""
        return ":" in self.model


def add_arguments(parser):
    """Declare the arguments of ``mpdemo plan``."""
    add_options(parser, Request)


def main(args) -> int:
    """Print a plan; return the exit status."""
    request = options_from(args, Request)
    if request.devices:
        print(advice.text(request))
        return 0
    if request.own_model:
        raise UserError("a model of your own is planned with --devices and --gpu-memory")
    result = make_plan(request)
    print(report.text(result))
    if request.json:
        Path(request.json).write_text(json.dumps(report.as_dict(result), indent=1) + "\n")
    return 0


def plan(**options):
    """Plan with the options of ``python -m mpdemo plan``, by name: ``plan(model="resnet101", stages=2, cost="v100")``.

    Returns
    -------
    mpdemo.plan.report.Plan
        ``report.text(plan)`` is the printed report.

    Raises
    ------
    UserError
        An unknown option, a wrong value, or nothing fits.
    """
    return make_plan(Request(**options))


def make_plan(request):
    """Measure or estimate the blocks and search for the best plan."""
    limit = float("inf") if request.gpu_memory is None else request.gpu_memory - RESERVE
    if limit <= 0:
        raise UserError(
            f"--gpu-memory {request.gpu_memory.human_readable()} is less than CUDA itself takes; "
            "allowed: 1GiB or more, with the unit, such as 16GiB"
        )
    facts = {name: getattr(request, name) for name in ("classes", "channels", "norm")}
    fixed = fixed_choices(request)
    subject = Subject(request.model, request.image_size, **facts)
    options = {"optimizer": request.optimizer, "form": request.form, "subject": subject}
    job = planner.Workload(footprints(**subject._asdict()), {}, request.stages, request.batch, limit, **options)
    smallest = planner.candidates(job, **fixed)
    if not smallest:
        raise UserError(
            f"no schedule runs {request.stages} devices with a batch of {request.batch} cut like that; "
            f"allowed: a batch with a divisor from {request.stages} to {planner.MOST_MICROBATCHES}, "
            "or other --microbatches, --schedule, --cut"
        )
    if smallest[0].overflow(limit):  # refused before minutes are spent on measuring
        that_fits(job, smallest)
    sizes = {request.batch} | {request.batch // c.microbatches for c in smallest}
    speeds, measured_on = _speeds(request, sizes, facts)
    job = replace(job, **speeds)
    candidates = planner.candidates(job, **fixed)
    best, devices = that_fits(job, [planner.choose(candidates, limit), *candidates])
    return report.Plan(request, job, best, devices, candidates, measured_on)


def that_fits(job, candidates):
    """Return the first of some candidates that fits by a dry run, and the memory of its devices; refuse where none."""
    tried = [(candidate, planner.devices(job, candidate)) for candidate in candidates[:1]]
    tried += [] if _largest(tried[0]) <= job.limit else [(c, planner.devices(job, c)) for c in candidates[1:3]]
    best = min(tried, key=lambda pair: (_largest(pair) > job.limit, pair[0].step_time))
    over = min(map(_largest, tried)) - job.limit
    if over > 0:
        nearest = min(tried, key=_largest)[0]
        raise UserError(
            f"no plan fits: {job.ranks} devices of {(job.limit + RESERVE) / 2**30:.3g} GiB (0.75 GiB of it for CUDA), "
            f"batch {job.batch}; the smallest found is over by {over / MIB:,.0f} MiB ({nearest.schedule}, "
            f"{nearest.microbatches} microbatches); allowed: more --gpu-memory or --stages, or a smaller --batch"
        )
    return best


def _largest(pair):
    return max(device.peak for device in pair[1])


def fixed_choices(request):
    """Refuse what no plan can do; return what the user fixed, as arguments for ``planner.candidates``."""
    allowed = ("GPipe",) if request.form == "one-process" else tuple(SCHEDULES)
    if request.schedule and request.schedule not in allowed:
        raise UserError(f"one process runs no {request.schedule}; allowed: GPipe, or --form per-device")
    if request.microbatches:
        check_schedule(request.schedule or "GPipe", request.stages, request.microbatches, batch=request.batch)
    names = block_names(request.model)
    if request.stages > len(names):
        raise UserError(f"--stages {request.stages} of a model of {len(names)} blocks; allowed: 1 to {len(names)}")
    stages = request.stages * (usual_stages_per_rank(request.schedule) if request.schedule else 1)
    return {
        "schedules": [request.schedule] if request.schedule else allowed,
        "microbatches": [request.microbatches] if request.microbatches else None,
        "cut": resolve_cut(names, request.cut, stages) if request.cut else None,
    }


def _speeds(request, sizes, model):
    """Return what the devices take, as a `Workload` has it, and on how many it was measured (0: a data sheet's)."""
    if request.cost not in (None, "measure"):
        return {"costs": estimate(request.model, sizes, request.image_size, request.cost, **model)}, 0
    machine = measured(request, sizes, request.stages if request.form == "per-device" else 1)
    return machine.speeds(), machine.devices
