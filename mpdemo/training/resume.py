"""Resume a training: find its newest checkpoint that is whole, refuse another training's, put everything back.

Taught in notebooks/09_checkpoint.ipynb. How a checkpoint is written: checkpoint.py.
"""

import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mpdemo.errors import UserError, error_line
from mpdemo.options import option_name
from mpdemo.training.checkpoint import FLAT, PARTS, checksums, in_order, place, tensors_of
from mpdemo.world.collectives import in_all


def newest(run_folder) -> Path:
    """Return the newest checkpoint of a run's folder.

    Raises
    ------
    UserError
        There is none.
    """
    folder = Path(run_folder) / "checkpoints"
    if not (checkpoints := in_order(folder)):
        own = next(
            (path for path in (Path(run_folder), *Path(run_folder).parents[:2]) if path.name == "checkpoints"), None
        )
        if own:
            raise UserError(f"--resume {run_folder} is inside a run's folder; give that folder: --resume {own.parent}")
        raise UserError(f"no checkpoint in {folder}; resume a run that was started with --checkpoint-every N")
    return checkpoints[-1]


def read(path, part=0, parts=1) -> dict:
    """Read the small part of a checkpoint, and compare one part of its files with their checksums.

    Raises
    ------
    UserError
        It is damaged or is something else.
    """
    try:
        with zipfile.ZipFile(path / "state.pt") as archive:  # PyTorch stores a checksum of each part, never compared
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} does not match its checksum")
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if missing := PARTS - set(state):
            raise KeyError(*sorted(missing))
        wanted = dict(sorted(state["checksums"].items())[part::parts])
        if checksums(path, part, parts) != wanted:
            raise ValueError("its files do not match their checksums")
    except Exception as error:  # torch.load raises many kinds of error on a damaged file
        raise UserError(f"{path} is not a checkpoint of mpdemo or is damaged ({error_line(error)})") from None
    return state


def read_newest(run_folder) -> dict:
    """Read the newest checkpoint of a run that is whole; a damaged one is named. Every rank must call this.

    The ranks share the work of looking for damage, and all use the same checkpoint, whose folder is in the result.
    """
    damaged, last = [], newest(run_folder)
    for path in reversed(in_order(last.parent)):
        try:
            state = in_all(read, path, *place())
        except UserError as error:
            damaged.append(error)
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


def check_settings(state, settings, length):
    """Refuse to resume with another batch, another model or another learning rate."""
    for name, saved in state["settings"].items():
        value = getattr(settings, name)
        if value != saved:
            option = option_name(name)
            raise UserError(f"the checkpoint is of a run with {option} {saved}, not {value}; give {option} {saved}")
    if settings.lr_schedule == "cosine" and state["length"] != length:
        raise UserError(
            f"the checkpoint's cosine ends after {state['length']} steps, not {length}; give the --epochs (or, without "
            "them, the --steps) of the run before; --steps with --epochs stops a run earlier in the same training"
        )


def restore(state, model, optimizer):
    """Put a checkpoint's tensors into a model (or a part of it) and its optimizer; every rank must call this."""
    reader = dcp.HuggingFaceStorageReader(str(state["path"]))
    shapes = {name: tensor.size for name, tensor in reader.read_metadata().state_dict_metadata.items()}
    own = tensors_of(model, optimizer)
    large = {name: tensor for name, tensor in own.items() if tensor.dim()}
    for name, tensor in large.items():
        if shapes.get(name) != tensor.shape:
            name = name.removeprefix("model.")
            raise UserError(f"the checkpoint is of another model: {name} is missing or of another shape in it")
    dcp.load(large, storage_reader=reader, no_dist=not dist.is_initialized())
    tensors = large | {name: state["small"][name] for name in own if name not in large}
    _, states = get_state_dict(model, optimizer, options=FLAT)
    set_state_dict(
        model,
        optimizer,
        model_state_dict={k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")},
        optim_state_dict=states
        | {k.removeprefix("optimizer."): v for k, v in tensors.items() if k.startswith("optimizer.")},
        options=FLAT,
    )
    rank, _ = place()
    if rank < len(state["random"]):  # in a larger world the new ranks keep the state that their seed gave them
        torch.set_rng_state(state["random"][rank]["torch"])
        if state["random"][rank]["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random"][rank]["cuda"])
