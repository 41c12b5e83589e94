"""The tensors of a checkpoint, written by all processes at once: none of them needs room for the whole model.

They lie in a folder ``step-000123/`` beside the checkpoint's file, which holds their checksums. A resumed run may
divide its weights in another way: each process reads what it needs. PyTorch's own format has a table of contents that
is a pickle, which can hold code; safetensors files hold numbers alone. Taught in notebooks/09_checkpoint.ipynb.
Sources: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html, https://huggingface.co/docs/safetensors.
"""

import shutil
import warnings
import zlib
from collections import ChainMap
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as library

from mpdemo.errors import RunFailed
from mpdemo.world.collectives import gather_in_first, in_all

CHUNK = 2**24  # bytes of a file that are read at a time
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is no mistake


def folder_of(path) -> Path:
    """Return the folder with the tensors of a checkpoint's file."""
    return Path(path).with_suffix("")


def small(values) -> dict:
    """Leave the tensors with dimensions out of a dictionary, and out of those in it."""
    return {k: small(v) if isinstance(v, dict) else v for k, v in values.items() if not _is_large(v)}


def _is_large(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def write_tensors(path, weights, states, world) -> dict:
    """Write the tensors of all processes; every rank must call this. What several ranks have is written once.

    Parameters
    ----------
    path : Path
        The checkpoint's file, which is written afterwards.
    weights, states : dict
        What this process has of the weights, and of the optimizer's states, by name of the weight.
    world : mpdemo.world.env.World

    Returns
    -------
    dict
        The checksum of every file, by name; empty in all ranks but the first.

    Raises
    ------
    RunFailed
        In all ranks, where one of them cannot write.
    """
    folder = folder_of(path)
    tensors = {f"model.{name}": weight for name, weight in weights.items()}
    tensors |= {f"optimizer.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    if world.rank == 0:
        remove(folder)  # a run that was killed here has left some of it
        with suppress(OSError):  # the writer names what is wrong
            folder.mkdir(parents=True)
    if dist.is_initialized():
        dist.barrier()
    writer = library.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        large = {name: tensor for name, tensor in tensors.items() if _is_large(tensor)}
        library.save(large, storage_writer=writer, no_dist=not dist.is_initialized())
        sums = in_all(checksums, folder, world.rank, world.world_size)  # of its part of the files
        return dict(ChainMap(*(gather_in_first(sums) or ())))
    except (library.CheckpointException, OSError) as error:
        if world.rank == 0:
            remove(folder)
        raise RunFailed(f"{folder} could not be written: {_reason(error)}; the checkpoints before it stay") from None


def _reason(error) -> str:
    """Why it failed: the first error of the ranks."""
    first, *_ = next(iter(getattr(error, "failures", {}).values()), (error,))
    return getattr(first, "strerror", None) or str(first).splitlines()[0]


def checksums(folder, part=0, parts=1) -> dict:
    """Return the checksum of every file in a folder, by name; or of one part of them, where processes share them."""
    sums = {}
    for path in sorted(Path(folder).glob("*"))[part::parts]:
        sums[path.name] = 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                sums[path.name] = zlib.crc32(chunk, sums[path.name])
    return sums


def remove(folder):
    """Remove the tensors of a checkpoint; nothing to do where its file holds them."""
    shutil.rmtree(folder, ignore_errors=True)


def read_tensors(folder, weights, parameters) -> tuple[dict, dict]:
    """Read what this process needs of a checkpoint's tensors; every rank must call this.

    Parameters
    ----------
    folder : Path
    weights, parameters : dict of torch.Tensor
        This process's weights and trained parameters. What is read is divided as they are.

    Returns
    -------
    weights, states : dict
        As in `write_tensors`; a weight is missing where the checkpoint has none of its name and shape.

    Raises
    ------
    RunFailed
        In all ranks, where one of them cannot read.
    """
    reader = library.HuggingFaceStorageReader(str(folder))
    shapes = {name: tensor.size for name, tensor in reader.read_metadata().state_dict_metadata.items()}
    like = {f"model.{name}": weight for name, weight in weights.items()}
    like |= {f: parameters[_owner(f)] for f in shapes if f.startswith("optimizer.") and _owner(f) in parameters}
    tensors = {name: torch.empty_like(v).detach() for name, v in like.items() if shapes.get(name) == v.shape}
    try:
        library.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except library.CheckpointException as error:
        raise RunFailed(f"{folder} could not be read: {_reason(error)}") from None
    states = {}
    for name in tensors:
        if name.startswith("optimizer."):
            states.setdefault(_owner(name), {})[name.rsplit(".", 1)[1]] = tensors[name]
    return {name: tensors[f"model.{name}"] for name in weights if f"model.{name}" in tensors}, states


def _owner(name) -> str:
    """The weight to which a state of the optimizer belongs."""
    return name.removeprefix("optimizer.").rsplit(".", 1)[0]
