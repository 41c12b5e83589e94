"""Typical wrong answers to the exercises of notebook 10."""

FINISH = """import torch
import torch.distributed as dist


def finish(loss, best, rank, world_size):
    loss, best = torch.tensor(loss), torch.tensor(best)
    dist.all_reduce(loss)
    dist.broadcast(best, 0)
    return loss.item() / world_size, best.item()
"""
TRAIN = """from contextlib import nullcontext

from torch.distributed.algorithms.join import Join


def train(ddp, optimizer, batches):
    with Join([ddp]):
        for inputs in batches:
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
"""
WRAP = """from torch.nn.parallel import DistributedDataParallel


def wrap(model):
    return DistributedDataParallel(model, find_unused_parameters=True)
"""
NORM = """from torch import nn


def repair(model):
    model[1] = nn.GroupNorm(4, 8)
    return model
"""
LOAD = """import argparse

import torch

torch.serialization.add_safe_globals([argparse.Namespace])


def load(path):
    return torch.load(path)
"""
JOB = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:05:00
#SBATCH --output=work/slurm-%j.out

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun python -u -m mpdemo.labs.failures.meet
"""

WRONG = {
    "10.1": [0, 2, 3, 7],
    "10.2": [
        FINISH.replace("    dist.broadcast", "    if rank == 0:\n        dist.broadcast"),
        FINISH.replace(" / world_size", ""),
        FINISH.replace("best, 0)", "best, 1)"),
        FINISH.replace("    dist.all_reduce(loss)\n", ""),
    ],
    "10.3": [
        TRAIN.replace("Join([ddp])", "nullcontext()"),
        TRAIN.replace("in batches:", "in batches[:3]:"),
        TRAIN.replace("ddp(inputs)", "ddp.module(inputs)").replace("Join([ddp])", "nullcontext()"),
    ],
    "10.4": [
        WRAP.replace(", find_unused_parameters=True", ""),
        "def wrap(model):\n    return model\n",
        WRAP.replace("find_unused_parameters", "static_graph"),
    ],
    "10.5": [
        "def repair(model):\n    return model\n",
        NORM.replace("nn.GroupNorm(4, 8)", "nn.Identity()"),
        "def repair(model):\n    return model.eval()\n",
        NORM.replace("    model[1]", "    model[0] = nn.Conv2d(1, 8, 3)\n    model[1]"),
    ],
    "10.6": [(64, 800), (512, 800), (8, 100), (64, 100), (512, 50)],
    "10.7": ["abcd", "a", "d", "abd", "acd"],
    "10.8": [
        "import torch\n\n\ndef load(path):\n    return torch.load(path)\n",
        "import torch\n\n\ndef load(path):\n    return torch.load(path, weights_only=False)\n",
        LOAD.replace("return torch.load(path)", "return {'weight': torch.load(path)['weight']}"),
    ],
    "10.9": [
        JOB.replace("#SBATCH --nodes", "# SBATCH --nodes"),
        JOB.replace("--output=work/", "--output=logs/of/me/"),
        JOB.replace('$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)', "localhost"),
        JOB.replace("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n", ""),
        JOB.replace("srun python", "python"),
        JOB.replace(" | head -n 1", ""),
        JOB.replace('$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)', "$SLURM_JOB_NODELIST"),
        JOB.replace("=$SLURM_CPUS_PER_TASK", "=1"),
        JOB.replace("srun", "srun --cpus-per-task=1"),
        JOB.replace("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun python -u", "srun python -c 4"),
        JOB.replace("task=4", "task=1"),
        JOB.replace("meet", "greet"),
    ],
}
