"""Go on from a checkpoint: the newest that can be read, of the same training, whatever rung wrote it.

Taught in notebooks/09_checkpoint.ipynb.
"""

import sys
from pathlib import Path

import torch

from mpdemo.errors import UserError
from mpdemo.options import option_name
from mpdemo.training import checkpoint, sharded
from mpdemo.training.run_log import rows_in
from mpdemo.world.collectives import in_all


def folder_to_resume(settings) -> Path | None:
    """Return the run folder to go on from, None for a new run.

    With ``--resume auto`` the same command starts a run and goes on with it, as a job that is queued again needs.

    Raises
    ------
    UserError
        A run would write into the folder of another one that has checkpoints, and so remove them.
    """
    out, resume = Path(settings.out), settings.resume and Path(settings.resume)
    saved = checkpoint.in_order(out / "checkpoints")
    if settings.resume == "auto":
        return out if saved else None
    if saved and not (resume and (resume.resolve() == out.resolve() or began_from(out) == settings.resume)):
        raise UserError(f"{out} holds the checkpoints of a run; --resume {out} or auto, or another --out")
    return resume or None


def began_from(folder) -> str | None:
    """Return the ``--resume`` with which the run in a folder began: a job that is queued again meets its own."""
    return next((row.get("resume") for row in rows_in(folder) if row.get("event") == "start"), None)


def read_newest(folder, rank=0, processes=1) -> dict:
    """Read the newest checkpoint of a run's folder; a damaged one is named, and the one before it is used.

    Every rank must call this. They share the work of looking for damage in the tensors of a sharded checkpoint, and all
    use the same one.

    Parameters
    ----------
    folder : str or Path
        Of the run.
    rank, processes : int
        This process; the first one names what is left out.

    Raises
    ------
    UserError
        There is no checkpoint, or none can be read.
    """
    damaged, newest = [], checkpoint.newest(folder)
    for path in reversed(checkpoint.in_order(newest.parent)):
        try:
            state = in_all(checkpoint.read, path, rank, processes)
        except UserError as error:
            damaged.append(error)
            continue
        state["folder"] = sharded.folder_of(path)
        if damaged and rank == 0:
            print(*(f"mpdemo: {error}" for error in damaged), sep="\n", file=sys.stderr)
            print(f"mpdemo: goes on from the checkpoint before it: {path}", file=sys.stderr)
        return state
    raise UserError(f"{damaged[0]}, and none before it can be read; start anew with another --out")


def check_settings(state, settings, length):
    """Refuse to go on with another batch, another model or another learning rate.

    Parameters
    ----------
    length : int
        Steps of the whole training; a constant learning rate may go on for longer than was planned.

    Raises
    ------
    UserError
        Naming the first setting that differs.
    """
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


def place(tensor, like):
    """Return a whole tensor on the device of another one; where that one is sharded, this process's part of it."""
    tensor = tensor.to(like.device)
    if not hasattr(like, "full_tensor") or hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)  # all have read the file


def add_shards(state, rung):
    """Add to the state of a sharded checkpoint the tensors that this process needs."""
    weights, states = sharded.read_tensors(state["folder"], rung.weights(), rung.named_parameters())
    state["model"] |= weights
    state["optimizer"] = {name: state["optimizer"].get(name, {}) | tensors for name, tensors in states.items()}


def restore(state, rung, optimizer, scheduler, rank):
    """Put a checkpoint's state into a training that was built with the same settings, of any rung.

    Raises
    ------
    UserError
        The checkpoint is of another model.
    """
    if state.get("shards"):
        add_shards(state, rung)
    for stage in rung.stages:
        own = stage.state_dict()
        unlike = [k for k, v in own.items() if k not in state["model"] or state["model"][k].shape != v.shape]
        if unlike:
            raise UserError(f"the checkpoint is of another model: {unlike[0]} is missing or of another shape in it")
        stage.load_state_dict({k: place(state["model"][k], v) for k, v in own.items()})
    for name, parameter in rung.named_parameters().items():
        if name in state["optimizer"]:
            optimizer.state[parameter] = {
                k: place(v, parameter) if isinstance(v, torch.Tensor) and v.dim() else v
                for k, v in state["optimizer"][name].items()
            }
    scheduler.load_state_dict(state["scheduler"])
    for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    if state.get("scaler"):
        rung.scaler.load_state_dict(state["scaler"])
    if rank < len(state["random"]):  # in a larger world the new ranks keep the state their seed gave them
        torch.set_rng_state(state["random"][rank]["torch"])
        if state["random"][rank]["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random"][rank]["cuda"])
