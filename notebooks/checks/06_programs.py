"""Test of the program in notebook 06: the weights of a stage, handed from the first replica to the other."""
# ruff: noqa: F821 - what the reader's program defines

import torch
import torch.distributed as dist
from torch import nn

STAGES = 2


def made(seed):
    """Return a stage whose weights this seed alone decides."""
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def test_06_2(rank, n):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, stage = divmod(rank, STAGES)
    model = made(rank)  # so ranks 0 and 1 have read the two stages, and ranks 2 and 3 have weights of their own
    hand_over(model, rows[replica], columns[stage])
    holds = [seed for seed in range(n) if torch.equal(model.weight, made(seed).weight)]
    if holds != [stage]:
        had = "no longer has the weights that it read" if replica == 0 else f"has other weights than stage {stage}"
        had = "still has the weights that it began with" if holds == [rank] else had
        had = f"has the weights of stage {1 - stage}" if holds == [1 - stage] else had
        raise AssertionError(f"Rank {rank} {had}.")
