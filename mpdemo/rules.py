"""What cannot go together in a training run, and the defaults that depend on other settings. Needs no PyTorch."""

import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

from mpdemo.cuts import block_names, check_split, resolve_cut
from mpdemo.errors import UserError
from mpdemo.options import option_name
from mpdemo.schedules import SCHEDULES, check_schedule, usual_stages_per_rank

SHARING_RUNGS = ("data_parallel", "ddp", "fsdp")  # every device takes a share of the batch
CUT_RUNGS = ("model_parallel", "pipeline", "hybrid")  # no device holds the whole model
LINEAR = ("toy", "transformer")  # models without convolutions, but for the one that embeds the patches


def require(condition, message):
    """Refuse what a user wrote, with a message, unless the condition holds."""
    if not condition:
        raise UserError(message)


def settled(s, world_size):
    """Return settings whose form is known with devices, replicas, stages and microbatches; refuse what cannot be."""
    _check_belonging(s)
    _check_savings(s)
    s = _with_grid(s, world_size) if s.rung == "hybrid" or (s.replicas or 1) > 1 else _with_devices(s, world_size)
    return _with_stages(s) if s.rung in ("pipeline", "hybrid") else _with_parts(s)


def records_timeline(rung, form) -> bool:
    """Whether a training run of this rung and form can record a timeline."""
    return form == "per-device" and rung in CUT_RUNGS


def _check_belonging(s):
    """Refuse an option of another rung."""
    recorded, hybrid = records_timeline(s.rung, s.form), s.rung == "hybrid"
    require(recorded or not s.timeline, f"--timeline records rungs {', '.join(CUT_RUNGS)} in the form per-device")
    require(hybrid or s.rung == "tensor" or s.replicas is None, "--replicas belongs to --rung hybrid or tensor alone")
    require(hybrid or s.mesh == "dp-pp", "--mesh belongs to --rung hybrid alone")
    require(hybrid or not s.sharded, "--sharded belongs to --rung hybrid alone")
    enough = not s.profile or s.steps is None or s.steps > 2
    require(enough, f"--steps {s.steps} with --profile, which leaves out two steps; allowed: 3 or more")
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
        not (s.precision == "bf16" and (s.rung == "fsdp" or s.sharded) and batch_norm(s.model, s.norm)),
        f"--precision bf16 of {shards} does not go with batch norm, whose averages stay in float32; use --norm group",
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


def batch_norm(model, norm) -> bool:
    """Whether a model of the course normalises with other images."""
    return norm == "batch" and model not in LINEAR


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
