"""Which settings that save memory or time can be combined with which rung. Needs no PyTorch.

How they are done is in mpdemo/parallel/savings.py. Taught in notebooks/11_which_one.ipynb.
"""

import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.options import option_name
from mpdemo.schedules import SCHEDULES

WHOLE = ("single", "data_parallel", "ddp", "fsdp", "tensor")  # microbatches one after the other
SCALED = ("single", "data_parallel", "ddp")  # rungs whose processes all see every gradient: one loss scale
LINEAR = ("toy", "transformer")  # models without convolutions, but for the one that embeds the patches


def check_savings(s):
    """Refuse settings that cannot work together.

    Raises
    ------
    UserError
        With what to do instead.
    """
    if s.precision == "fp16" and s.rung not in SCALED:
        raise UserError(f"--precision fp16 needs one loss scale, rung {s.rung} has none; use bf16")
    if s.channels_last and s.model in LINEAR:
        raise UserError(
            f"--channels-last is a memory layout for convolutions, of no use to model {s.model}; leave it out"
        )
    if s.channels_last and (s.rung == "fsdp" or s.sharded):
        option = "--sharded" if s.sharded else "--rung fsdp"
        raise UserError(f"--channels-last does not go with {option}, which shards weights that lie row by row")
    if s.compile and s.rung == "data_parallel":
        raise UserError("--compile does not reach the copies that data_parallel makes in every step; use --rung ddp")
    for name in ("activation_checkpointing", "compile", "sharded"):
        if getattr(s, name):
            _check_whole_backward(s, option_name(name))
    if s.timeline and s.accumulate > 1:
        raise UserError(f"--timeline records a batch in one piece, not in --accumulate {s.accumulate} parts; give one")


def _check_whole_backward(s, option):
    """Refuse a schedule that divides the backward pass, which these options need whole.

    A block, or its compiled backward pass, would be computed anew for each part; FSDP would not see the gradients.
    """
    scheduled = s.form == "per-device" and s.rung in ("pipeline", "hybrid")
    if scheduled and SCHEDULES[s.schedule].splits_backward:
        whole = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.splits_backward)
        raise UserError(
            f"{option} does not go with --schedule {s.schedule}, which splits the backward pass of every block; "
            f"allowed: {whole}"
        )


def with_accumulation(s, world_size):
    """Return the settings with as many parts of the batch as ``--micro-batch-size`` asks for.

    The batch stays the same when a training goes on with more or fewer devices: each of them does fewer or more parts.

    Raises
    ------
    UserError
        The batch does not divide, or the rung divides it in another way.
    """
    if s.micro_batch_size is None:
        return s
    if s.rung not in ("single", "ddp", "fsdp"):
        raise UserError(f"--micro-batch-size belongs to --rung single, ddp or fsdp, not {s.rung}; use --microbatches")
    devices = 1 if s.rung == "single" else world_size or s.processes or 2
    parts, rest = divmod(s.batch_size, devices * s.micro_batch_size)
    if rest or not parts:
        raise UserError(
            f"--batch-size {s.batch_size} (all processes together) does not divide by {devices} devices x "
            f"--micro-batch-size {s.micro_batch_size}; allowed: a multiple of {devices * s.micro_batch_size}"
        )
    if s.accumulate not in (1, parts):
        raise UserError(
            f"--accumulate {s.accumulate} contradicts --micro-batch-size, which gives {parts}; leave it out"
        )
    return replace(s, accumulate=parts)


def in_parts(s, settle):
    """Settle the settings of one part of an accumulated batch by ``settle(settings)``; return those of the batch.

    A rung that holds the whole model computes its microbatches one after the other: there both settings are one.

    Raises
    ------
    UserError
        The batch does not divide, or both settings are given and differ.
    """
    parts = s.accumulate
    if s.rung in WHOLE and parts > 1:
        if s.microbatches not in (None, parts):
            raise UserError(
                f"rung {s.rung} computes its microbatches one after the other, so --accumulate {parts} and "
                f"--microbatches {s.microbatches} are the same setting; give one of them"
            )
        s, parts = replace(s, microbatches=parts, accumulate=1), 1
    if s.batch_size % parts:
        raise UserError(
            f"--batch-size {s.batch_size} does not divide into --accumulate {parts} parts; allowed: a multiple of "
            f"{parts}, such as {max(1, s.batch_size // parts) * parts}"
        )
    try:
        return replace(settle(replace(s, batch_size=s.batch_size // parts)), batch_size=s.batch_size)
    except UserError as error:
        raise UserError(f"in each of the --accumulate {parts} parts: {error}" if parts > 1 else str(error)) from None


def check_compiler():
    """Refuse to compile where there is no C++ compiler, or no header of Python for what it compiles."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UserError(f"--compile needs a C++ compiler, {compiler} is not found; install g++ or set CXX to another")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise UserError(f"--compile needs {header}; install Python's development files, or leave it out")
