"""What the scripts of the zoo share: a process group, small data, a small network, and one file as a checkpoint."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self, wide=8, classes=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(wide, 16), nn.Tanh())
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(x))


def start() -> tuple:
    """Return whether the right twin is asked for, this rank, and the number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="run the right twin")
    fixed = parser.parse_args().fixed
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return fixed, dist.get_rank(), dist.get_world_size()


def samples(number=192, wide=8):
    """Return rows and classes, the same in every rank."""
    chance = torch.Generator().manual_seed(7)
    x = torch.randn(number, wide, generator=chance)
    return TensorDataset(x, (x @ torch.randn(wide, 4, generator=chance)).argmax(1))


def save(**state):
    """Write a checkpoint from rank 0, whole or not at all."""
    if dist.get_rank() == 0:
        torch.save(state, "last.tmp")
        os.replace("last.tmp", "last.pt")
    dist.barrier()


def load():
    """Return the checkpoint, if there is one."""
    return torch.load("last.pt") if os.path.exists("last.pt") else None
