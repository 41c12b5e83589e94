"""Typical wrong answers to the exercises of notebook 09."""

LOAD = """
def load(training, path):
    state = torch.load(path)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    training.epoch, training.done = state["place"]
    torch.set_rng_state(state["random"])
"""
SAVE = """import torch


def save(training, path):
    state = {name: getattr(training, name).state_dict() for name in ("model", "optimizer", "scheduler")}
    state["place"] = training.epoch, training.done
    state["random"] = torch.get_rng_state()
    torch.save(state, path)
"""


def without(name):
    """Save all, and load all but one thing."""
    return SAVE + "\n" + "\n".join(line for line in LOAD.splitlines() if name not in line) + "\n"


ATOMIC = """import os
import torch


def save(state, path):
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
"""
ALL_RANKS = """import torch
import torch.distributed as dist


def save(part, path, rank, world_size):
    parts = [None] * world_size
    dist.all_gather_object(parts, part)
    if rank == 0:
        torch.save({name: tensor for part in parts for name, tensor in part.items()}, path)
    dist.barrier()
"""
HANGS = """import torch
import torch.distributed as dist


def save(part, path, rank, world_size):
    if rank == 0:
        parts = [None] * world_size
        dist.all_gather_object(parts, part)
        torch.save({name: tensor for part in parts for name, tensor in part.items()}, path)
"""
JOB = """#!/bin/bash
#SBATCH --job-name=long
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=work/slurm-%j.out

srun python -u -m mpdemo train --rung single --model transformer --batch-size 64 --steps 12 --log-every 1 \
--resume auto --out work/long
status=$?
[ "$status" -eq 3 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""

WRONG = {
    "09.1": ["weights", "position", "all"],
    "09.2": [1, 2, 4, 5],
    "09.3": [
        without("training.optimizer.load"),
        without("training.scheduler.load"),
        without("training.epoch, training.done"),
        without("set_rng_state"),
        without("training.model.load"),
        SAVE + LOAD.replace('training.epoch, training.done = state["place"]', 'training.epoch, _ = state["place"]'),
        SAVE.replace("torch.save(state, path)", "torch.save(state)") + LOAD,
        SAVE,
    ],
    "09.4": [(1, 1), (0, 0), (1, 0), (0, 2)],
    "09.5": [
        "import torch\n\n\ndef save(state, path):\n    torch.save(state, path)\n",
        ATOMIC.replace("        os.fsync(file.fileno())\n", ""),
        ATOMIC.replace("        os.fsync(file.fileno())\n", "").replace(
            "        torch.save", "        os.fsync(file.fileno())\n        torch.save"
        ),
        ATOMIC.replace("file.fileno()", "os.open(path.parent, os.O_RDONLY)"),
        ATOMIC.replace('path.with_suffix(".tmp")', '"/tmp/mpdemo-exercise-last.tmp"'),
        ATOMIC.replace(
            "    os.replace", "    os.rename(path, f'{path}.old') if path.exists() else None\n    os.replace"
        ),
        ATOMIC.replace("    os.replace", "    path.unlink(missing_ok=True)\n    os.replace"),
        ATOMIC.replace("    os.replace(temporary, path)", "    import shutil\n    shutil.copy(temporary, path)"),
        ATOMIC.replace("    os.replace(temporary, path)", "    open(path, 'wb').write(open(temporary, 'rb').read())"),
        "def save(state, path):\n    pass\n",
    ],
    "09.6": [
        HANGS,
        ALL_RANKS.replace("    if rank == 0:\n        torch", "    torch"),
        ALL_RANKS.replace("    dist.barrier()\n", ""),
        ALL_RANKS.replace("    dist.all_gather_object(parts, part)\n", "    parts = [part]\n"),
        ALL_RANKS.replace("if rank == 0:", "if rank > 2:"),
    ],
    "09.7": ["equal", "different", "other"],
    "09.8": [(137, 0), (13, 0), (37, 37), (0, 0), (37, 10)],
    "09.9": ["a", "b", "bcd", "cd", "d", "cx"],
    "09.10": [4, 3, 6],
    "09.11": [
        JOB.replace("#SBATCH --signal=USR1@120\n", ""),
        JOB.replace("USR1@", "B:USR1@"),
        JOB.replace("USR1@", "TERM@"),
        JOB.replace("@120", "@5"),
        JOB.replace("@120", "@3600"),
        JOB.replace("--requeue", "--no-requeue"),
        JOB.replace("--resume auto", ""),
        JOB.replace("--resume auto", "--resume work/long"),
        JOB.replace("--out work/long", "--out=work/short"),
        JOB.replace("srun python", "python"),
        JOB.replace("USR1@120\n#SBATCH --requeue", "B:USR1@120 --requeue"),
        JOB.replace("--requeue", "--requeue --no-requeue"),
        JOB.replace("scontrol requeue", "echo requeue"),
        JOB.replace("#SBATCH --signal", "# SBATCH --signal"),
        JOB.replace("-eq 3", "-eq 0"),
        JOB.replace("--model transformer", "--model transformers"),
    ],
    "09.12": [(3, 3), (0.5, 0.25), (1.5, 3), (1.5, 1.5), (1, 0.5)],
    "09.13": [(4, 4), (1, 1), (2, 1), (4, 8), (1, 4)],
}
