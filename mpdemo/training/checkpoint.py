"""Save a training so that a resumed run equals an uninterrupted one, whatever rung goes on with it.

A checkpoint holds the weights and the optimizer's state under the names of the uncut model, the learning-rate
schedule, epoch and step (which say where the sampler is) and every rank's random state. Writing is atomic: a file
is there whole or not at all. Taught in notebooks/01_single_device.ipynb.
Source: https://docs.pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html.
"""

import os
import zipfile
from pathlib import Path

import torch

from mpdemo.errors import UserError
from mpdemo.options import option_name
from mpdemo.world.collectives import gather_objects

KEEP = 2  # newest files that stay
SAME = ("model", "norm", "dataset", "image_size", "batch_size", "seed", "lr")  # settings that a resumed run must keep


def collect(rung, optimizer, scheduler, settings, epoch, step, epoch_steps) -> dict:
    """Gather the whole training's state; every rank must call this, and every rank gets it.

    Parameters
    ----------
    epoch : int
        The epoch that `step` belongs to, counted from 0.
    step : int
        Steps done since the start of the training.
    epoch_steps : list
        Results of the epoch's steps so far, for its averages.
    """
    rung.synchronise()
    names = {id(p): name for name, p in rung.named_parameters().items()}
    own_part = {
        "model": {k: v.cpu() for stage in rung.stages for k, v in stage.state_dict().items()},
        "optimizer": {names[id(p)]: _to_cpu(state) for p, state in optimizer.state.items()},
        "random": {"torch": torch.get_rng_state(), "cuda": _cuda_random()},
    }
    parts = gather_objects(own_part)
    return {
        "model": {k: v for part in reversed(parts) for k, v in part["model"].items()},
        "optimizer": {k: v for part in reversed(parts) for k, v in part["optimizer"].items()},
        "random": [part["random"] for part in parts],
        "scheduler": scheduler.state_dict(),
        "scaler": rung.scaler.state_dict(),
        "settings": {name: getattr(settings, name) for name in SAME},
        "epoch": epoch,
        "step": step,
        "epoch_steps": epoch_steps,
    }


def _to_cpu(state):
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _cuda_random():
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def write(folder, state) -> Path:
    """Write `state` as ``folder/step-000123.pt``, whole or not at all, and drop all but the newest `KEEP` files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{state['step']:06d}.pt"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    temporary.replace(path)
    for old in [*in_order(folder)[:-KEEP], *folder.glob("*.tmp")]:
        old.unlink()
    return path


def in_order(folder) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    steps = {path: path.stem.removeprefix("step-") for path in Path(folder).glob("step-*.pt")}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))


def newest(run) -> Path:
    """Return the newest checkpoint of a run's folder.

    Raises
    ------
    UserError
        There is none.
    """
    checkpoints = in_order(Path(run) / "checkpoints")
    if not checkpoints:
        raise UserError(f"no checkpoint in {run}/checkpoints; resume a run that was started with --checkpoint-every N")
    return checkpoints[-1]


def read(path) -> dict:
    """Read a checkpoint; only tensors and plain values, never code, can come out of it.

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
        missing = {"model", "optimizer", "scheduler", "settings", "epoch", "step", "epoch_steps", "random"} - set(state)
        if missing:
            raise KeyError(*sorted(missing))
    except Exception as error:  # torch.load raises many kinds of error on a damaged file
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{path} is not a checkpoint of mpdemo or is damaged ({reason}); "
            "move it away to resume from the one before it"
        ) from None
    return state


def check_settings(state, settings):
    """Refuse to go on with another batch, another model or another learning rate.

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


def restore(state, rung, optimizer, scheduler, rank):
    """Put a checkpoint's state into a training that was built with the same settings, of any rung.

    Raises
    ------
    UserError
        The checkpoint is of another model.
    """
    for stage in rung.stages:
        own = stage.state_dict()
        unlike = [k for k, v in own.items() if k not in state["model"] or state["model"][k].shape != v.shape]
        if unlike:
            raise UserError(f"the checkpoint is of another model: {unlike[0]} is missing or of another shape in it")
        stage.load_state_dict({k: state["model"][k] for k in own})
    for name, parameter in rung.named_parameters().items():
        if name in state["optimizer"]:
            optimizer.state[parameter] = {
                k: v.to(parameter.device) if isinstance(v, torch.Tensor) and v.dim() else v
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
