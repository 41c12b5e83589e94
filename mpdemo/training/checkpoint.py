"""Save a training run so that a resumed run equals an uninterrupted one, whatever rung resumes it.

A checkpoint is a folder, ``checkpoints/step-000123``: the weights and the optimizer's state under the names of the
uncut model, each process having written what it holds (safetensors: numbers alone, never code), and ``state.pt``, with
what is small: the learning-rate schedule, epoch and step (which say where the sampler is), every rank's random state,
and the checksums. It gets its name when all of it is on the disk, so it is there whole or not at all. Taught in
notebooks/09_checkpoint.ipynb. Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

import os
import shutil
import sys
import warnings
import zipfile
import zlib
from collections import ChainMap
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from mpdemo.errors import RunFailed, UserError, error_line
from mpdemo.world.collectives import gather_objects, place
from mpdemo.world.launch import lost_a_peer

KEEP = 2  # newest checkpoints that stay
CHUNK = 2**24  # bytes of a file that are read at a time
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by name: else a stage cannot find its own
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is no mistake


def save(folder, model, optimizer, state):
    """Write a checkpoint of what this process holds of a model, and `state`, the small rest; every rank must call this.

    A full disk or a folder that cannot be written is a `RunFailed`.
    """
    path = Path(folder) / f"step-{state['step']:06d}"
    temporary, (rank, _) = path.with_suffix(".tmp"), place()
    if rank == 0:
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
        smalls, randoms = zip(*gather_objects((small, random)), strict=True)
        if rank == 0:
            finish(path, state | {"small": dict(ChainMap(*smalls)), "random": list(randoms)})
    except (dcp.CheckpointException, OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        if lost_a_peer(error):
            raise
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        first, *_ = next(iter(getattr(error, "failures", {}).values()), (error,))
        causes = (first, getattr(first, "__cause__", None), getattr(first, "__context__", None))
        why = next((c.strerror for c in causes if isinstance(c, OSError) and c.strerror), str(first).splitlines()[0])
        raise RunFailed(f"{path} could not be written: {why}; the checkpoints before it stay") from None


def tensors_of(model, optimizer) -> dict:
    """Return this process's weights and optimizer state by name; sharded ones are DTensors."""
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    found = {f"model.{name}": weight.detach() for name, weight in weights.items()}
    for name, value in states.items():
        if isinstance(value, torch.Tensor):
            found[f"optimizer.{name}"] = value
    return found


def finish(path, state):
    """Add ``state.pt`` to a checkpoint whose tensors are written, give it its name, and drop all but the newest."""
    temporary = path.with_suffix(".tmp")
    sums = checksums(temporary)
    with (temporary / "state.pt").open("wb") as file:
        torch.save(state | {"checksums": sums}, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    shutil.rmtree(path, ignore_errors=True)  # damaged: this run resumed the one before it
    temporary.replace(path)
    until_this = [old for old in in_order(path.parent) if step_of(old) <= state["step"]]  # a newer one is damaged
    for old in [*until_this[:-KEEP], *path.parent.glob("*.tmp")]:
        shutil.rmtree(old, ignore_errors=True)


def checksums(folder) -> dict:
    """Return the checksum of every file of tensors in a folder, by name."""
    sums = {path.name: 0 for path in folder.iterdir() if path.name != "state.pt"}
    for path in map(folder.joinpath, sums):
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


def newest(run_folder) -> Path:
    """Return the newest checkpoint of a run's folder; refuse a folder without one."""
    folder = Path(run_folder) / "checkpoints"
    if not (checkpoints := in_order(folder)):
        above = (folder.parent, *folder.parent.parents[:2])
        if own := next((path.parent for path in above if path.name == "checkpoints"), None):
            raise UserError(f"--resume {run_folder} is inside a run's folder; give that folder: --resume {own}")
        raise UserError(f"no checkpoint in {folder}; resume a run that was started with --checkpoint-every N")
    return checkpoints[-1]


def read(path) -> dict:
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


def read_newest(run_folder) -> dict:
    """Read the newest checkpoint of a run that is whole; a damaged one is named. Every rank must call this.

    All use the same checkpoint, the newest that each of them can read; its folder is in the result.
    """
    damaged, last = [], newest(run_folder)
    for path in reversed(in_order(last.parent)):
        error = None
        try:
            state = read(path)
        except UserError as refusal:
            error = refusal
        if errors := list(filter(None, gather_objects(error))):
            damaged.append(errors[0])
            continue
        if damaged and place()[0] == 0:
            print(*(f"mpdemo: {error}" for error in damaged), sep="\n", file=sys.stderr)
            print(f"mpdemo: resumes the checkpoint before it: {path}", file=sys.stderr)
        return state | {"path": path}
    raise UserError(f"{damaged[0]}, and none before it can be read; start anew with another --out")


def tensors(path) -> dict:
    """Read every tensor of a checkpoint, whole, by name: ``model.NAME`` and ``optimizer.state.NAME.KEY``."""
    reader = dcp.HuggingFaceStorageReader(str(path))
    kinds = reader.read_metadata().state_dict_metadata
    found = {name: torch.empty(kind.size, dtype=kind.properties.dtype, device="cpu") for name, kind in kinds.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def restore(state, model, optimizer):
    """Put a checkpoint's tensors into a model (or a part of it) and its optimizer; every rank must call this."""
    own = tensors_of(model, optimizer)
    large = {name: tensor for name, tensor in own.items() if tensor.dim()}
    reader = dcp.HuggingFaceStorageReader(str(state["path"]))
    shapes = {name: tensor.size for name, tensor in reader.read_metadata().state_dict_metadata.items()}
    for name in (name for name, tensor in large.items() if shapes.get(name) != tensor.shape):
        name = name.removeprefix("model.")
        raise UserError(f"the checkpoint is of another model: {name} is missing or of another shape in it")
    dcp.load(large, storage_reader=reader, no_dist=not dist.is_initialized())
    found = large | {name: state["small"][name] for name in own if name not in large}
    weights, states = (
        {name.removeprefix(kind): tensor for name, tensor in found.items() if name.startswith(kind)}
        for kind in ("model.", "optimizer.")
    )
    states = get_state_dict(model, optimizer, options=FLAT)[1] | states
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=FLAT)
    rank, _ = place()
    if rank < len(state["random"]):  # in a larger world the new ranks keep the state that their seed gave them
        torch.set_rng_state(state["random"][rank]["torch"])
        if state["random"][rank]["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random"][rank]["cuda"])
