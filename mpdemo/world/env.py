"""Rank, local rank, world size and device of this process, whichever launcher started it.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE; Slurm's srun sets SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS; a plain
``python`` sets neither and is a world of one. On a machine without GPUs a device is a core, locked by one process where
enough are free. Taught in notebooks/11_first_job.ipynb.
Sources: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables,
https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.
"""

import contextlib
import fcntl
import os
import re
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mpdemo.errors import UserError
from mpdemo.world.processes import end_with_parent

LOCK = "/tmp/mpdemo-core-{}.lock"  # one for all users: they share the cores as well
# those that this process was given, before it pins itself to some of them
ALLOWED_CORES = os.sched_getaffinity(0)
# Slurm's numbers from here on are no steps of srun: a batch script, an interactive job
RESERVED = 4294967290


@dataclass(frozen=True)
class World:
    """The place of one process among all, and what it computes on."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # these two count on this node only
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")  # GPU number local_rank, or one core of the CPU
    backend: str = "gloo"  # between GPUs NCCL, with gloo for tensors in CPU memory
    launcher: str = "none"  # or torchrun, or slurm


def read_launcher(environ) -> dict:
    """Return rank, world_size, local_rank, local_world_size, launcher by a launcher's variables; refuse wrong ones."""
    if "RANK" in environ:
        launcher, names = "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif _is_slurm_task(environ):
        launcher, names = "slurm", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "launcher": "none"}
    try:
        rank, world_size, local_rank = (int(environ[name]) for name in names)
        on_node = (
            _tasks_on_node(environ) if launcher == "slurm" else int(environ.get("LOCAL_WORLD_SIZE", 0))
        )
        on_node = on_node or world_size
        if not (0 <= rank < world_size and 0 <= local_rank < on_node <= world_size):
            raise ValueError
    except (KeyError, ValueError):
        given = ", ".join(f"{name}={environ.get(name, '')}" for name in (*names, "LOCAL_WORLD_SIZE"))
        raise UserError(
            f"these are not the numbers of a launch by {launcher}: {given}; check the launcher"
        ) from None
    place = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
    return place | {"local_world_size": on_node, "launcher": launcher}


def _is_slurm_task(environ) -> bool:
    """Whether srun started this process as a task: a batch script or an interactive shell also has SLURM_PROCID."""
    step = int(environ.get("SLURM_STEP_ID") or RESERVED)
    shell = "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"  # srun --pty bash
    return "SLURM_PROCID" in environ and step < RESERVED and not shell


def _tasks_on_node(environ) -> int:
    """Return the number of processes on this node. Slurm writes ``2(x3),1``: two on three nodes, one on the next."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
    return dict(enumerate(counts)).get(int(environ.get("SLURM_NODEID", 0)), 0)


def where_am_i(environ=os.environ, devices=1) -> World:
    """Return this process's `World`; on a GPU node, make the first of its `devices` the current one."""
    values = read_launcher(environ)
    if not torch.cuda.is_available():
        return World(**values)
    visible, local_rank = torch.cuda.device_count(), values["local_rank"]
    # with srun --gpus-per-task each task sees its own GPUs only, from number 0 on
    index = 0 if visible == devices and values["launcher"] == "slurm" else local_rank * devices
    # of the whole job: tasks that all see one GPU would share it
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if index >= visible or (on_node.isdigit() and values["local_world_size"] * devices > int(on_node)):
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: {values['local_world_size']} processes on this node, "
            f"{visible} GPUs visible; start at most {visible}, or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    torch.cuda.set_device(index)
    return World(**values, device=torch.device("cuda", index), backend="cpu:gloo,cuda:nccl")


def claim_cores(world, count=1):
    """Make `count` CPU cores the devices of this process: one thread each, pinned where so many cores are free.

    A core is taken by locking it. A process that needs more than are free takes none, and runs where it may.
    """
    if world.device.type != "cpu":
        return
    torch.set_num_threads(1)
    allowed, locks = sorted(os.sched_getaffinity(0)), {}
    for core in allowed if len(allowed) >= count * world.local_world_size else []:
        if len(locks) < count and (lock := _locked(core)) is not None:
            locks[core] = lock
    if len(locks) == count:
        os.sched_setaffinity(0, locks)  # the files stay open, and so locked, until this process ends
        return
    for lock in locks.values():
        os.close(lock)


def _locked(core) -> int | None:
    """Return the open lock file of a core; None if another process has it, or files cannot be locked here."""
    path, flags = LOCK.format(core), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        try:
            file = os.open(path, flags)
        except FileNotFoundError:  # in /tmp, Linux refuses O_CREAT for another user's file
            file = os.open(path, flags | os.O_CREAT, 0o444)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            os.close(file)
    return None


@contextlib.contextmanager
def process_group(world, timeout):
    """Join the world's process group for a ``with`` block; a collective that some rank never joined fails in time."""
    if world.world_size == 1 and not os.environ.get("MASTER_ADDR"):
        yield
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not set: a batch script must export the first node's name and a port"
        )
    if not re.fullmatch("[1-9][0-9]{0,4}", port := os.environ["MASTER_PORT"]) or int(port) > 65535:
        raise UserError(f"MASTER_PORT {port} is not a port; allowed: 1 to 65535")
    place = {"rank": world.rank, "world_size": world.world_size}
    try:
        dist.init_process_group(world.backend, **place, timeout=timedelta(seconds=timeout))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "in use" not in str(error):
            raise
        taken = f"port {os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']}"
        raise UserError(f"{taken} is in use; set MASTER_PORT to another one") from None
    yield  # after an error the group is left as it is: destroying it may wait for ranks that are gone
    # PyTorch's threads must have ended the last collective before the group is destroyed. Without the next two lines
    # it aborted in 2 of 8 runs with "terminate called without an active exception", with them in none.
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


@contextlib.contextmanager
def join_world(devices=1, timeout=300.0):
    """Join the processes that were started, as one that drives so many devices; yields this one's `World`."""
    end_with_parent()
    world = where_am_i(devices=devices)
    claim_cores(world, devices)
    with process_group(world, timeout):
        yield world
