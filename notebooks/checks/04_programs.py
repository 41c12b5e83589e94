"""Test of a program in notebook 04: one checkpoint."""
# ruff: noqa: F821 - what the reader's program defines

import os

import torch
import torch.utils.checkpoint
from torch import nn

from checks.helpers import gathered, slow_saves


def test_04_4(rank, n):
    torch.manual_seed(0)
    model, path = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), str(folder / "model.pt")
    with slow_saves() as saved:
        save((model[:2], model[2:])[rank], path, rank, n)
        there = os.path.exists(path)
        wait_for_all()
    counts = [len(files) for files in gathered(saved)]
    assert sum(counts) == 1, (
        f"Rank 0 writes {counts[0]} files and rank 1 writes {counts[1]}; the last one would win."
    )
    file = torch.load(path)
    missing = sorted(set(model.state_dict()) - set(file))
    assert not missing, f"There is one file, but it lacks {', '.join(missing)}: another stage's weights."
    assert all(torch.equal(file[name], value) for name, value in model.state_dict().items()), (
        "The weights differ."
    )
    assert there, f"Rank {rank} continued before the file was there. If it loads it now, it fails."
