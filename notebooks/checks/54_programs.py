"""Tests of the programs in notebook 54: one checkpoint of the parts of all ranks, and one of all stages."""
# ruff: noqa: F821 - what the reader's program defines

import os

import torch
from torch import nn

from checks.helpers import gathered, slow_saves


def test_54_1(rank, n):
    path = folder / "checkpoint.pt"
    with slow_saves() as saved:
        save({f"weight{rank}": torch.full((2,), float(rank))}, path, rank, n)
        there = path.exists()
        names = sorted(torch.load(path)) if there else []
        wait_for_all()
    counts = sorted(map(len, gathered(saved)))
    assert counts != [1, 1], "Both ranks wrote the file, at the same time and under the same name."
    assert counts == [0, 1], f"The ranks wrote {counts[1]} and {counts[0]} files."
    assert there, f"Rank {rank} came back from save, and the file wasn't there yet."
    assert names == ["weight0", "weight1"], f"The file holds {', '.join(names) or 'nothing'}."


def test_54_2(rank, n):
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
