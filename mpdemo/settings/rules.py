"""What cannot go together in a training run, and the defaults that depend on other settings. Needs no PyTorch."""

import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.options import option_name
from mpdemo.settings.cuts import block_names, check_split, resolve_cut
from mpdemo.settings.schedules import SCHEDULES, check_schedule, usual_stages_per_rank

SHARING_RUNGS = ("data_parallel", "ddp", "fsdp")  # every device takes a share of the batch
CUT_RUNGS = ("model_parallel", "pipeline", "hybrid")  # no device holds the whole model
LINEAR = ("toy", "transformer")  # models without convolutions, but for the one that embeds the patches
OF_RUNGS = {  # option: its default, the only rungs that take another value
    "replicas": (None, ("hybrid",)),
    "sharded": (False, ("hybrid",)),
}


def settled(s, world_size):
    """Return settings whose form is known with devices, replicas, stages and microbatches; refuse what cannot be."""
    _check_belonging(s)
    _check_savings(s)
    s = _with_grid(s, world_size) if s.rung == "hybrid" else _with_devices(s, world_size)
    return _with_stages(s) if s.rung in ("pipeline", "hybrid") else _with_parts(s)


def records_timeline(rung, form) -> bool:
    """Whether a training run of this rung and form can record a timeline."""
    return form == "per-device" and rung in CUT_RUNGS


def _check_belonging(s):
    """Refuse an option of another rung."""
    for name, (default, rungs) in OF_RUNGS.items():
        if s.rung not in rungs and getattr(s, name) != default:
            raise UserError(f"{option_name(name)} belongs to --rung {' or '.join(rungs)} alone")
    if s.timeline and not records_timeline(s.rung, s.form):
        raise UserError(f"--timeline records rungs {', '.join(CUT_RUNGS)} in the form per-device")
    if s.sharded and s.replicas == 1:
        raise UserError("--sharded divides stages among replicas; allowed: --replicas 2 or more")
    if s.profile and s.steps is not None and s.steps <= 2:
        raise UserError(f"--steps {s.steps} with --profile, which leaves out two steps; allowed: 3 or more")


def _check_savings(s):
    """Refuse what saves memory or time where it cannot be combined with the rung, the model or the schedule."""
    if s.precision == "bf16" and (s.sharded or s.rung == "fsdp") and batch_norm(s.model, s.norm):
        norm = "batch norm, whose averages stay in float32; use --norm group"
        raise UserError(f"--precision bf16 of {'--sharded' if s.sharded else '--rung fsdp'} does not go with {norm}")
    if s.compile and s.rung == "data_parallel":
        raise UserError("--compile does not reach the copies that data_parallel makes in every step; use --rung ddp")
    if s.form == "per-device" and s.rung in ("pipeline", "hybrid") and SCHEDULES[s.schedule].splits_backward:
        # a block, or its compiled backward pass, would be computed anew for each part; FSDP would miss the gradients
        whole = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.splits_backward)
        for name in ("activation_checkpointing", "compile", "sharded"):
            if getattr(s, name):
                splits = f"--schedule {s.schedule}, which splits the backward pass of every block"
                raise UserError(f"{option_name(name)} does not go with {splits}; allowed: {whole}")


def batch_norm(model, norm) -> bool:
    """Whether a model of the course normalises with other images."""
    return norm == "batch" and model not in LINEAR


def _started(s, world_size) -> int | None:
    """Return how many processes there are by the launcher or by the settings; None where neither says it."""
    if world_size and s.processes not in (None, world_size):
        raise UserError(f"--processes {s.processes} contradicts the launcher's {world_size} processes; leave it out")
    return world_size or s.processes


def _with_devices(s, world_size):
    """Settle the number of processes and of devices of a rung without replicas of a cut model."""
    if s.form == "per-device":
        count = _started(s, world_size) or 2
        return replace(s, processes=count, devices=count)
    started = world_size or s.processes
    if started not in (None, 1):
        more = "" if s.rung == "single" else " (and say --devices for how many devices it drives)"
        raise UserError(f"rung {s.rung} in the one-process form was started as {started} processes; start 1{more}")
    return replace(s, processes=1, devices=1 if s.rung == "single" else s.devices or 2)


def _with_grid(s, world_size):
    """Settle processes, replicas, and the devices of each replica; a grid has one process per device."""
    replicas = s.replicas or 2
    processes = _started(s, world_size) or replicas * (s.devices or 2)
    if processes % replicas or processes == replicas:
        allowed = f"a multiple of {replicas} from {2 * replicas} on, or another --replicas"
        many = f"{replicas} replicas of 2 or more devices each"
        raise UserError(f"{processes} processes do not make {many}; allowed: {allowed}")
    _check_divides(s, replicas, f"{replicas} replicas")
    return replace(s, processes=processes, replicas=replicas, devices=processes // replicas)


def _check_divides(s, divisor, parts):
    """Refuse a batch that does not come out in equal parts."""
    if s.batch_size % divisor:
        allowed = f"a multiple of {divisor}, such as {max(1, s.batch_size // divisor) * divisor}"
        batch = f"--batch-size {s.batch_size} (all processes together)"
        raise UserError(f"{batch} does not divide by {parts}; allowed: {allowed}")


def _with_parts(s):
    """Settle the parts whose gradients are accumulated, and refuse a batch that does not divide."""
    parts, shares = s.microbatches or 1, s.devices if s.rung in SHARING_RUNGS else s.replicas or 1
    if s.rung == "tensor":
        check_split(s.model, s.devices)
    if s.rung == "model_parallel":
        if parts > 1:
            raise UserError(f"rung model_parallel takes no --microbatches {parts}: with them it is --rung pipeline")
        resolve_cut(block_names(s.model), s.cut, s.devices)
    on = f" on {shares} devices" if shares > 1 else ""
    _check_divides(s, shares * parts, f"{shares} devices" if parts == 1 else f"{parts} microbatches{on}")
    return replace(s, microbatches=parts)


def _with_stages(s):
    """Settle the microbatches of a pipeline, or of each replica of one; one process runs GPipe's order."""
    share = s.batch_size // (s.replicas or 1)
    schedule = "GPipe" if s.form == "one-process" else s.schedule
    parts = s.microbatches or next((m for m in (4 * s.devices, 2 * s.devices) if share % m == 0), s.devices)
    check_schedule(schedule, s.devices, parts, share)
    if parts < s.devices:
        few = f"{parts} microbatches are fewer than the {s.devices} devices, so some would never work"
        raise UserError(f"{few}; allowed: {s.devices} or more, or --rung model_parallel")
    resolve_cut(block_names(s.model), s.cut, s.devices * usual_stages_per_rank(schedule))
    return replace(s, schedule=schedule, microbatches=parts)


def check_compiler():
    """Refuse to compile where there is no C++ compiler, or no header of Python for what it compiles."""
    compiler, header = os.environ.get("CXX", "g++"), Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not shutil.which(compiler):
        raise UserError(f"--compile needs a C++ compiler, {compiler} is not found; install g++ or set CXX to another")
    if not header.exists():
        raise UserError(f"--compile needs {header}; install Python's development files, or leave it out")
