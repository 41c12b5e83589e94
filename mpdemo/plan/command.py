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

from mpdemo.cuts import block_names, resolve_cut
from mpdemo.errors import UserError, error_line
from mpdemo.options import add_options, options_from
from mpdemo.plan import advice, planner, report
from mpdemo.plan.footprint import estimate, footprints
from mpdemo.plan.machine import measured
from mpdemo.plan.request import Request, check_together
from mpdemo.plan.subject import MIB, RESERVE, Subject
from mpdemo.schedules import SCHEDULES, check_schedule, usual_stages_per_rank


def add_arguments(parser):
    """Declare the arguments of ``mpdemo plan``."""
    add_options(parser, Request)


def main(args) -> int:
    """Print a plan; return the exit status."""
    request = options_from(args, Request)
    check_together(request, vars(args))
    try:
        if request.devices:
            text, rows = advice.answer(request)
            result = {"rows": rows}
        else:
            plan = make_plan(request)
            text, result = report.text(plan), report.as_dict(plan)
    except Exception as error:
        if isinstance(error, UserError) or not request.own_model:
            raise
        what = f"--model {request.model} cannot be planned: it fails without real numbers"
        raise UserError(f"{what} ({error_line(error)}); try the part that takes tensors and returns some") from error
    print(text)
    if request.json:
        try:
            Path(request.json).write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json {request.json} cannot be written: {error.strerror}") from None
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
