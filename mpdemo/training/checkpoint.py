"""Save a training so that a resumed run equals an uninterrupted one, whatever rung resumes it.

A checkpoint is a folder, ``checkpoints/step-000123``: the weights and the optimizer's state under the names of the
uncut model, each process having written what it holds (safetensors: numbers alone, never code), and ``state.pt``, with
what is small: the learning-rate schedule, epoch and step (which say where the sampler is), every rank's random state,
and the checksums. It gets its name when all of it is on the disk, so it is there whole or not at all. Taught in
notebooks/09_checkpoint.ipynb. Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

import os
import shutil
import warnings
import zlib
from collections import ChainMap
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from mpdemo.errors import RunFailed
from mpdemo.world.collectives import gather_in_first, in_all

KEEP = 2  # newest checkpoints that stay
# settings that a resumed run must keep
SAME = (
    "model",
    "norm",
    "dataset",
    "image_size",
    "batch_size",
    "seed",
    "optimizer",
    "lr",
    "warmup_steps",
    "lr_schedule",
)
PARTS = {"small", "scheduler", "settings", "length", "epoch", "step", "epoch_steps", "random", "checksums"}
CHUNK = 2**24  # bytes of a file that are read at a time
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by name: else a stage cannot find its own
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is no mistake


def save(folder, model, optimizer, state):
    """Write a checkpoint of a model, or of this process's part of it, into `folder`; every rank must call this.

    Parameters
    ----------
    folder : Path
        The run's ``checkpoints``.
    model : nn.Module
        What this process holds, under the names of the uncut model.
    optimizer : torch.optim.Optimizer
    state : dict
        The small rest, with ``step``.

    Raises
    ------
    RunFailed
        The disk is full, a quota is reached, or the folder cannot be written.
    """
    path = Path(folder) / f"step-{state['step']:06d}"
    temporary, first = path.with_suffix(".tmp"), not dist.is_initialized() or dist.get_rank() == 0
    if first:
        with suppress(OSError):  # the writer names what is wrong
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed here
            temporary.mkdir(parents=True)
    if dist.is_initialized():
        dist.barrier()
    tensors = tensors_of(model, optimizer)
    small = {name: tensor.cpu() for name, tensor in tensors.items() if not tensor.dim()}
    random = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None}
    try:
        writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        large = {name: tensor for name, tensor in tensors.items() if tensor.dim()}
        dcp.save(large, storage_writer=writer, no_dist=not dist.is_initialized())
        sums = in_all(checksums, temporary, *place())  # each process of its part of the files
        parts = gather_in_first({"small": small, "random": random, "checksums": sums})
        if parts:
            merged = {name: dict(ChainMap(*(part[name] for part in parts))) for name in ("small", "checksums")}
            finish(path, state | merged | {"random": [part["random"] for part in parts]})
    except (dcp.CheckpointException, OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RunFailed(f"{path} could not be written: {_reason(error)}; the checkpoints before it stay") from None


def tensors_of(model, optimizer) -> dict:
    """Return what this process has of the weights and of the optimizer's state, by name; those sharded as DTensors."""
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    found = {f"model.{name}": weight.detach() for name, weight in weights.items()}
    for name, value in states.items():
        if isinstance(value, torch.Tensor):
            found[f"optimizer.{name}"] = value
    return found


def finish(path, state):
    """Add ``state.pt`` to a checkpoint whose tensors are written, give it its name, and drop all but the newest."""
    temporary = path.with_suffix(".tmp")
    with (temporary / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    shutil.rmtree(path, ignore_errors=True)  # damaged: this run resumed the one before it
    temporary.replace(path)
    until_this = [old for old in in_order(path.parent) if step_of(old) <= state["step"]]  # a newer one is damaged
    for old in [*until_this[:-KEEP], *path.parent.glob("*.tmp")]:
        shutil.rmtree(old, ignore_errors=True)


def _reason(error) -> str:
    """Why it failed: the first error of the ranks."""
    first, *_ = next(iter(getattr(error, "failures", {}).values()), (error,))
    causes = (first, getattr(first, "__cause__", None), getattr(first, "__context__", None))
    return next((c.strerror for c in causes if isinstance(c, OSError) and c.strerror), str(first).splitlines()[0])


def place() -> tuple[int, int]:
    """Return this process's rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def checksums(folder, part=0, parts=1) -> dict:
    """Return the checksum of every file of tensors in a folder, by name; or of one part of them."""
    sums = {}
    for path in sorted(path for path in Path(folder).iterdir() if path.name != "state.pt")[part::parts]:
        sums[path.name] = 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                sums[path.name] = zlib.crc32(chunk, sums[path.name])
    return sums


def step_of(path) -> int:
    return int(path.name.removeprefix("step-"))


def in_order(folder) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    found = (path for path in Path(folder).glob("step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(found, key=step_of)
