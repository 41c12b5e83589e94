"""Tests of the programs in notebook 33: a step in any grid, and the weights of a stage, handed to another replica."""
# ruff: noqa: F821 - what the reader's program defines

import math
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from checks.helpers import gradients, ratio, require_gradients


def test_33_1(rank, n):
    """Three grids of the same ranks, whose stages all have one shape, so that a wrong group raises no error."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 4), torch.randn(8, 4)
    for replicas in (2, 1, 4):
        model = nn.Sequential(*[made(number) for number in range(n // replicas)])
        replica, stage = divmod(rank, len(model))
        part, module = (
            [tensor.chunk(replicas)[replica].clone() for tensor in (images, labels)],
            deepcopy(model[stage]),
        )
        step(module, mse_loss, *part, rank, len(model), replicas)
        own, where = gradients(module), f"In the grid of {replicas} x {len(model)}, on rank {rank}"
        mse_loss(model(images), labels).backward()
        whole = [gradients(layer) for layer in model]
        mse_loss(model(images.chunk(replicas)[replica]), labels.chunk(replicas)[replica]).backward()
        alone = [gradients(layer) for layer in model]
        told = f"{where} the gradients are those of its own replica's images: nothing averages the column."
        assert replicas == 1 or math.isnan(ratio(own, alone[stage])), told
        told = f"{where} the gradients of different stages are added up: over which ranks?"
        for mixed in (whole, alone):
            sums = [sum(same) for same in zip(*mixed, strict=True)]
            assert len(model) == 1 or math.isnan(ratio(own, sums)), told
        require_gradients(own, whole[stage], where)


def made(seed):
    """Return a stage whose weights this seed alone decides."""
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def test_33_2(rank, n):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, stage = divmod(rank, 2)
    # so ranks 0 and 1 have read the two stages, and ranks 2 and 3 have weights of their own
    model = made(rank)
    hand_over(model, rows[replica], columns[stage])
    holds = [seed for seed in range(n) if torch.equal(model.weight, made(seed).weight)]
    if holds != [stage]:
        had = (
            "no longer has the weights that it read"
            if replica == 0
            else f"has other weights than stage {stage}"
        )
        had = "still has the weights that it began with" if holds == [rank] else had
        had = f"has the weights of stage {1 - stage}" if holds == [1 - stage] else had
        raise AssertionError(f"Rank {rank} {had}.")
