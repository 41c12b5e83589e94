"""Save a training so that a resumed run equals an uninterrupted one, whatever rung goes on with it.

A checkpoint holds the weights and the optimizer's state under the names of the uncut model, the learning-rate
schedule, epoch and step (which say where the sampler is) and every rank's random state. Writing is atomic: a file
is there whole or not at all. Taught in notebooks/09_checkpoint.ipynb.
Source: https://docs.pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html.
"""

import os
import zipfile
from contextlib import suppress
from pathlib import Path

import torch

from mpdemo.errors import RunFailed, UserError, error_line
from mpdemo.training import sharded
from mpdemo.world.collectives import gather_in_first, whole

KEEP = 2  # newest files that stay
# settings that a resumed run must keep
SAME = (
    *("model", "norm", "dataset", "image_size", "batch_size", "seed"),
    *("optimizer", "lr", "warmup_steps", "lr_schedule"),
)
PARTS = {"model", "optimizer", "scheduler", "settings", "length", "epoch", "step", "epoch_steps", "random"}


def save(run, folder):
    """Write a checkpoint of a `mpdemo.training.loop.Run`; every rank must call this.

    Raises
    ------
    RunFailed
        In rank 0 where the file cannot be written; in all ranks where the tensors of a sharded one cannot.
    """
    run.rung.synchronise()
    shards, own = {}, own_tensors(run)
    if run.settings.sharded_checkpoints:
        shards = sharded.write_tensors(path_of(folder, run.step), *own.values(), run.world)
        own = sharded.small(own)
    if state := collect(run, own):
        write(folder, state | {"shards": shards})


def own_tensors(run) -> dict:
    """What this process has of the weights and of the optimizer's states, under the names of the uncut model."""
    names = {id(p): name for name, p in run.rung.named_parameters().items()}
    return {
        "model": run.rung.weights(),
        "optimizer": {names[id(p)]: state for p, state in run.optimizer.state.items()},
    }


def collect(run, own) -> dict | None:
    """Gather the whole state of a training in rank 0; every rank must call this, others get None."""
    own_part = {"random": {"torch": torch.get_rng_state(), "cuda": _cuda_random()}}
    for part, tensors in own.items():  # sharded ones need every process
        copies = ((name, _to_cpu(value)) for name, value in tensors.items())
        own_part[part] = {name: value for name, value in copies if run.rung.saves}
    parts = gather_in_first(own_part)
    return parts and {
        "model": {k: v for part in parts for k, v in part["model"].items()},
        "optimizer": {k: v for part in parts for k, v in part["optimizer"].items()},
        "random": [part["random"] for part in parts],
        "scheduler": run.scheduler.state_dict(),
        "scaler": run.rung.scaler.state_dict(),
        "settings": {name: getattr(run.settings, name) for name in SAME},
        "length": run.length,  # steps of the whole training
        "epoch": run.epoch,  # that `step` belongs to, counted from 0
        "step": run.step,  # steps done since the start of the training
        "epoch_steps": run.epoch_steps,  # results of the epoch's steps so far, for its averages
    }


def _to_cpu(state):
    """Copy a tensor, or those in a dictionary, to the CPU; a sharded one whole."""
    if isinstance(state, dict):
        return {k: _to_cpu(v) for k, v in state.items()}
    return whole(state).cpu() if isinstance(state, torch.Tensor) else state


def _cuda_random():
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def write(folder, state) -> Path:
    """Write `state` as ``folder/step-000123.pt``, whole or not at all, and drop all but the newest `KEEP` files.

    Raises
    ------
    RunFailed
        The disk is full, a quota is reached, or the folder cannot be written.
    """
    path = path_of(folder, state["step"])
    folder = path.parent
    temporary = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it gets its name
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError of many lines
        with suppress(OSError):
            temporary.unlink()
        if not path.exists():
            sharded.remove(sharded.folder_of(path))  # of no use without it, and the disk may be full
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
        raise RunFailed(f"{path} could not be written: {reason}; the checkpoints before it stay") from None
    files = in_order(folder)
    until_this = files[: files.index(path) + 1]  # a newer one is damaged: this run went on from the one before it
    for old in [*until_this[:-KEEP], *folder.glob("*.tmp")]:
        old.unlink()
    for tensors in folder.glob("step-*[0-9]/"):  # of a file that is gone, or that a killed run did not come to write
        if not tensors.with_suffix(".pt").exists():
            sharded.remove(tensors)
    return path


def path_of(folder, step) -> Path:
    """The file of a step's checkpoint."""
    return Path(folder) / f"step-{step:06d}.pt"


def in_order(folder) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    steps = {path: path.stem.removeprefix("step-") for path in Path(folder).glob("step-*.pt")}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))


def newest(folder) -> Path:
    """Return the newest checkpoint of a run's folder.

    Raises
    ------
    UserError
        There is none.
    """
    place = Path(folder) / "checkpoints"
    checkpoints = in_order(place)
    if not checkpoints:
        raise UserError(f"no checkpoint in {place}; resume a run that was started with --checkpoint-every N")
    return checkpoints[-1]


def read(path, part=0, parts=1) -> dict:
    """Read a checkpoint; only tensors and plain values, never code, can come out of it.

    Parameters
    ----------
    path : Path
    part, parts : int
        Of a sharded checkpoint's files this process compares one part with their checksums, others the rest.

    Raises
    ------
    UserError
        The file is damaged or is something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # PyTorch stores a checksum of each part and does not compare it
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} does not match its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = PARTS - set(state)
        if missing:
            raise KeyError(*sorted(missing))
        wanted = dict(sorted(state.get("shards", {}).items())[part::parts])
        if wanted and sharded.checksums(sharded.folder_of(path), part, parts) != wanted:
            raise ValueError(f"the files in {sharded.folder_of(path).name}/ do not match their checksums")
    except Exception as error:  # torch.load raises many kinds of error on a damaged file
        raise UserError(f"{path} is not a checkpoint of mpdemo or is damaged ({error_line(error)})") from None
    return state
