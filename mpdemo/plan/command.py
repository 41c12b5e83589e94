"""``python -m mpdemo plan``: where to cut a model, which schedule, how many microbatches, and whether it fits.

    python -m mpdemo plan --model resnet101 --stages 2 --batch 128 --image-size 224 --gpu-memory 16GiB
    python -m mpdemo plan --model resnet101 --stages 2 --batch 128 --image-size 224 --cost v100 --schedule 1f1b

No GPU is needed, and nothing is trained. Taught in notebooks/05_pipeline.ipynb.
"""

import argparse
import json
import re
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.plan import planner, report
from mpdemo.plan.memory import RESERVE
from mpdemo.plan.refusal import refuse
from mpdemo.schedules import SCHEDULES, check_schedule, usual_stages_per_rank

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def add_arguments(parser):
    """Declare the arguments of ``mpdemo plan``."""
    parser.add_argument("--model", default="resnet101", help="as for train (default %(default)s)")
    parser.add_argument("--stages", type=int, default=2, metavar="P", help="devices to cut the model over")
    parser.add_argument("--batch", type=int, default=128, help="samples of the whole batch")
    parser.add_argument("--image-size", type=int, default=224, metavar="PIXELS")
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--norm", default="batch", help="batch or group")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of one device, such as 16GiB; no limit by default")
    parser.add_argument("--schedule", help=f"only this one of: {', '.join(SCHEDULES)}")
    parser.add_argument("--microbatches", type=int, metavar="M", help="only this number")
    parser.add_argument("--cut", help="only this cut, as for train: layer2.3 or 8")
    parser.add_argument("--form", default="per-device", help="per-device (one process each) or one-process")
    parser.add_argument("--optimizer", default="sgd", help="sgd, momentum or adamw")
    parser.add_argument("--cost", default="measure", help="measure on this machine, or estimate for v100, a100, h100")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to spend on measuring (default 60)")
    parser.add_argument("--json", metavar="FILE", help="write the plan there too")


def main(args) -> int:
    """Print a plan; return the exit status."""
    found = plan(**vars(args))
    print(report.text(found))
    if args.json:
        Path(args.json).write_text(json.dumps(report.as_dict(found), indent=1) + "\n")
    return 0


def plan(**options):
    """Plan with the options of ``python -m mpdemo plan``, by name: ``plan(model="resnet101", stages=2, cost="v100")``.

    Returns
    -------
    mpdemo.plan.report.Plan
        ``report.text(plan)`` says it in words.

    Raises
    ------
    UserError
        A wrong value, or nothing fits.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([])
    vars(args).update(options)
    limit = parse_size(args.gpu_memory) - RESERVE if args.gpu_memory else float("inf")
    if limit <= 0:
        raise UserError(f"--gpu-memory {args.gpu_memory} is less than CUDA itself takes; allowed: 1GiB or more")
    return make_plan(args, limit, check(args))


def parse_size(text):
    """Return bytes from a size such as 16GiB.

    Raises
    ------
    UserError
        No number, or no unit.

    Examples
    --------
    >>> parse_size("16GiB") == 16 * 2**30
    True
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|MiB|GB|MB)\s*", str(text))
    if not match:
        raise UserError(f"cannot read the size {text!r}; allowed: a number and {', '.join(UNITS)}, such as 16GiB")
    return float(match[1]) * UNITS[match[2]]


def check(args):
    """Refuse what no plan can do; return what the user fixed, as arguments for ``planner.candidates``."""
    from mpdemo.models import NAMES, build, resolve_cut
    from mpdemo.plan import memory
    from mpdemo.plan.roofline import ROOFS

    for what, value, allowed in (
        ("model", args.model, NAMES),
        ("form", args.form, ("per-device", "one-process")),
        ("optimizer", args.optimizer, memory.OPTIMIZERS),
        ("cost", args.cost, ("measure", *ROOFS)),
    ):
        memory.one_of(what, value, allowed)
    for what in ("stages", "batch", "image_size", "channels", "classes"):
        if getattr(args, what) < 1:
            raise UserError(f"--{what.replace('_', '-')} is {getattr(args, what)}; allowed: whole numbers from 1")
    if args.form == "one-process" and args.schedule not in (None, "gpipe", "naive"):
        raise UserError(f"one process knows no schedule {args.schedule}; allowed: gpipe, naive, or --form per-device")
    schedules = [args.schedule] if args.schedule else list(SCHEDULES)
    if args.form == "one-process" and not args.schedule:
        schedules = ["naive", "gpipe"]
    if args.schedule:
        per_rank = usual_stages_per_rank(args.schedule)
        if args.microbatches or args.schedule == "naive":
            check_schedule(args.schedule, args.stages, args.microbatches or 1, per_rank, args.batch)
    elif args.microbatches:
        check_schedule("gpipe", args.stages, args.microbatches, None, args.batch)
    import torch

    with torch.device("meta"):
        names = build(args.model, classes=args.classes, channels=args.channels, image_size=args.image_size).names
    if args.stages > len(names):
        raise UserError(f"--stages {args.stages} of a model of {len(names)} blocks; allowed: 1 to {len(names)}")
    cut = None
    if args.cut:
        stages = args.stages * (usual_stages_per_rank(args.schedule) if args.schedule else 1)
        cut = resolve_cut(names, args.cut, stages)
    return {"schedules": schedules, "microbatches": [args.microbatches] if args.microbatches else None, "cut": cut}


def make_plan(args, limit, fixed):
    """Measure or estimate the blocks, search, and run the chosen plan on fake tensors until its memory is right.

    Returns
    -------
    mpdemo.plan.report.Plan

    Raises
    ------
    UserError
        Nothing fits the limit, or nothing can run.
    """
    from mpdemo.plan import memory
    from mpdemo.plan.footprint import footprints

    model = {"classes": args.classes, "channels": args.channels, "norm": args.norm}
    blocks = footprints(args.model, args.image_size, **model)
    job = planner.Job(blocks, {}, args.stages, args.batch, limit, args.optimizer)
    before = planner.candidates(job, **fixed)
    if not before:
        raise UserError(
            f"no schedule runs {args.stages} devices with a batch of {args.batch} cut like that; allowed: a batch with "
            f"a divisor from {args.stages} to {planner.MOST_MICROBATCHES}, or other --microbatches, --schedule, --cut"
        )
    if before[0].overflow(limit):  # said before minutes are spent on measuring
        refuse(job, before[0], **fixed)
    costs = _costs(args, sorted({args.batch} | {args.batch // c.microbatches for c in before}), model)
    allowed = limit
    for _ in range(3):
        job = planner.Job(blocks, costs, args.stages, args.batch, allowed, args.optimizer)
        found = planner.candidates(job, **fixed)
        best = planner.choose(found, allowed)
        if best.overflow(allowed):
            refuse(job, best, **fixed)
        devices = memory.estimate(
            args.model,
            best.points,
            args.batch,
            args.image_size,
            form=args.form,
            schedule=best.schedule,
            microbatches=best.microbatches,
            optimizer=args.optimizer,
            **model,
        )
        excess = max(device.peak for device in devices) / limit
        if excess <= 1:
            return report.Plan(args, job, best, found, devices)
        allowed *= 0.99 / excess  # the footprints' sum was a little low: ask for less
    return refuse(job, best, **fixed)


def _costs(args, sizes, model):
    """Return the cost of every block at every microbatch size."""
    import torch

    from mpdemo.models import build
    from mpdemo.plan import cost, roofline

    if args.cost != "measure":
        return roofline.estimate(args.model, sizes, args.image_size, args.cost, **model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a device on a CPU is one core, as in training
    try:
        blocks = build(args.model, image_size=args.image_size, **model).to(device)
        images = torch.randn(max(sizes), args.channels, args.image_size, args.image_size, device=device)
        return cost.measure(blocks, images, sizes, budget=args.budget)
    finally:
        torch.set_num_threads(threads)
