"""Save a training run so that a resumed run equals an uninterrupted one, whatever rung resumes it.

A checkpoint is a folder, ``checkpoints/step-000123``: the weights and the optimizer's state under the names of the
uncut model, each process having written what it holds (safetensors: numbers alone, never code), and ``state.pt``, with
what is small: the learning-rate schedule, epoch and step (which say where the sampler is), every rank's random state,
and the checksums. It gets its name when all of it is on the disk, so it is there whole or not at all. Taught in
notebooks/10_checkpoint.ipynb. Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

import os
import shutil
import warnings
import zipfile
import zlib
from collections import ChainMap
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from mpdemo.errors import RunFailed, UserError, error_line
from mpdemo.world.collectives import gather_objects, place
from mpdemo.world.launch import lost_a_peer
from mpdemo.world.say import log

KEPT = 2  # newest checkpoints that stay
CHUNK = 2**24  # bytes of a file that are read at a time
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by name: else a stage cannot find its own
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is no mistake


def save(folder: str | Path, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Write a checkpoint of what this process holds of a model, and `state`, the rest; all ranks must call this."""
    path = Path(folder) / f"step-{state['step']:06d}"
    temporary = path.with_suffix(".tmp")
    rank, _ = place()
    if rank == 0:
        with suppress(OSError):  # the writer names what is wrong
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed here
            temporary.mkdir(parents=True)
    if dist.is_initialized():
        dist.barrier()
    tensors = tensors_of(model, optimizer)
    try:
        write(temporary, tensors, state)
        if rank == 0:
            publish(temporary, path)
    except (dcp.CheckpointException, OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        if lost_a_peer(error):
            raise
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RunFailed(f"{path} could not be written: {reason(error)}; the checkpoints before it stay") from None


def write(folder: Path, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Write the tensors of all ranks into a folder, and then, in rank 0, ``state.pt``."""
    large = {name: tensor for name, tensor in tensors.items() if tensor.dim()}
    small = {name: tensor.cpu() for name, tensor in tensors.items() if not tensor.dim()}
    random = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None}
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(large, storage_writer=writer, no_dist=not dist.is_initialized())
    smalls, randoms = zip(*gather_objects((small, random)), strict=True)
    if place()[0] > 0:
        return
    rest = {"small": dict(ChainMap(*smalls)), "random": list(randoms), "checksums": checksums(folder)}
    with (folder / "state.pt").open("wb") as file:
        torch.save(state | rest, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name


def publish(temporary: Path, path: Path) -> None:
    """Give a checkpoint that is written its name, and drop all but the newest."""
    shutil.rmtree(path, ignore_errors=True)  # damaged: this run resumed the one before it
    temporary.replace(path)
    until_this = [old for old in in_order(path.parent) if step_of(old) <= step_of(path)]  # a newer one is damaged
    for old in [*until_this[:-KEPT], *path.parent.glob("*.tmp")]:
        shutil.rmtree(old, ignore_errors=True)


def reason(error: BaseException) -> str:
    """Return why a checkpoint could not be written: what the system said, if it is a cause of the error."""
    first = next(iter(getattr(error, "failures", {}).values()), (error,))[0]  # of the first rank that failed
    for cause in (first, getattr(first, "__cause__", None), getattr(first, "__context__", None)):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return str(first).splitlines()[0]


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return this process's weights and optimizer state by name; sharded ones are DTensors."""
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    found = {}
    for kind, values in (("model", weights), ("optimizer", states)):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                found[f"{kind}.{name}"] = value.detach()
    return found


def checksums(folder: Path) -> dict[str, int]:
    """Return the checksum of every file of tensors in a folder, by name."""
    sums = {path.name: 0 for path in folder.iterdir() if path.name != "state.pt"}
    for path in map(folder.joinpath, sums):
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                sums[path.name] = zlib.crc32(chunk, sums[path.name])
    return sums


def step_of(path: Path) -> int:
    """Return after how many steps a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def in_order(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    found = (path for path in Path(folder).glob("step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(found, key=step_of)


def newest(run_folder: str | Path) -> Path:
    """Return the newest checkpoint of a run's folder.

    Parameters
    ----------
    run_folder : str or Path
        As ``--out`` of the run that wrote it: ``"runs/ddp"``.

    Raises
    ------
    UserError
        There is none.
    """
    folder = Path(run_folder) / "checkpoints"
    checkpoints = in_order(folder)
    if not checkpoints:
        raise UserError(f"no checkpoint in {folder}; give the --out of a run that had --checkpoint-every N")
    return checkpoints[-1]


def read(path: Path) -> dict[str, Any]:
    """Read the small part of a checkpoint and, in rank 0, compare its files with their checksums; refuse damage."""
    try:
        with zipfile.ZipFile(path / "state.pt") as archive:  # PyTorch stores a checksum of each part, never compared
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} does not match its checksum")
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if place()[0] == 0 and checksums(path) != state["checksums"]:  # the others hear of it in `read_newest`
            raise ValueError("its files do not match their checksums")
    except Exception as error:  # torch.load raises many kinds of error on a damaged file
        raise UserError(f"{path} is not a checkpoint of mpdemo or is damaged ({error_line(error)})") from None
    return state


def read_newest(run_folder: str | Path) -> dict[str, Any]:
    """Read the newest checkpoint of a run that is whole for every rank; name damaged ones. All ranks must call it."""
    damaged = []
    for path in reversed(in_order(newest(run_folder).parent)):
        state, damage = {}, None
        try:
            state = read(path)
        except UserError as error:
            damage = error
        damages = [each for each in gather_objects(damage) if each]
        if not damages:
            if damaged and place()[0] == 0:
                for each in damaged:
                    log.warning("%s", each)
                log.warning("resumes the checkpoint before it: %s", path)
            return state | {"path": path}
        damaged.append(damages[0])
    raise UserError(f"{damaged[0]}, and none before it can be read; start anew with another --out")


def tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint, whole, in one process.

    Parameters
    ----------
    path : str or Path
        The folder of a checkpoint, as `newest` returns it.

    Returns
    -------
    dict
        By name: weights as ``model.NAME``, of the shape that they have in the uncut model, and the optimizer's states
        of a weight as ``optimizer.state.NAME.KEY``, of the same shape.
    """
    reader = dcp.HuggingFaceStorageReader(str(path))
    found = {
        name: torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
        for name, about in stored_in(reader).items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def stored_in(reader: dcp.HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    """Return what is known of each tensor of a checkpoint before it is read, by name."""
    found = reader.read_metadata().state_dict_metadata
    return {name: about for name, about in found.items() if isinstance(about, TensorStorageMetadata)}


def restore(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Put a checkpoint's tensors into a model (or a part of it) and its optimizer; every rank must call this."""
    own = tensors_of(model, optimizer)
    large = {name: tensor for name, tensor in own.items() if tensor.dim()}
    reader = dcp.HuggingFaceStorageReader(str(state["path"]))
    shapes = {name: about.size for name, about in stored_in(reader).items()}
    for name, tensor in large.items():
        if shapes.get(name) != tensor.shape:
            what = f"{name.removeprefix('model.')} is missing or of another shape in it"
            raise UserError(f"the checkpoint is of another model: {what}")
    dcp.load(large, storage_reader=reader, no_dist=not dist.is_initialized())
    found = large | {name: state["small"][name] for name in own if name not in large}
    weights = {name.removeprefix("model."): each for name, each in found.items() if name.startswith("model.")}
    states: dict[str, Any] = get_state_dict(model, optimizer, options=FLAT)[1]  # what is no tensor stays as it is
    states |= {name.removeprefix("optimizer."): each for name, each in found.items() if name.startswith("optimizer.")}
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=FLAT)
    rank, _ = place()
    if rank < len(state["random"]):  # in a larger world the new ranks keep the state that their seed gave them
        torch.set_rng_state(state["random"][rank]["torch"])
        if state["random"][rank]["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random"][rank]["cuda"])
