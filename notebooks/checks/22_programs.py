"""Tests of the programs in notebook 22: samples split among ranks, a loop adapted to DDP."""
# ruff: noqa: F821 - what the reader's program defines

import copy
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from checks.helpers import gathered


def test_22_1(rank, n):
    """Two ranks with two workers each have four readers, among whom only twelve samples can be divided."""
    for workers, count in product((0, 2), (12, 13, 14)):
        files = [list(range(first, first + 4)) for first in (0, 4)] + [list(range(8, count))]
        options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        parts = gathered(
            [int(sample) for sample in DataLoader(Stream(files, rank, n), batch_size=None, **options)]
        )
        read, sizes, where = (
            sorted(sum(parts, [])),
            [len(part) for part in parts],
            f"With num_workers={workers}",
        )
        where += f" and {count} samples," * (count > 12)
        often = next((sample for sample in read if read.count(sample) > 1), None)
        assert often is None, (
            f"{where} an epoch of both ranks has sample {often} {read.count(often)} times."
        )
        too_few = f"{where} both ranks together read {len(read)} of {count} samples."
        assert set(read) <= {*range(count)} and len(read) > count - n * max(workers, 1), too_few
        unequal = f"{where} rank 0 reads {sizes[0]} samples and rank 1 reads {sizes[1]}: one of them runs out first."
        assert sizes[0] == sizes[1], unequal


def test_22_2(rank, n):
    """The first number of an input says which one it is; the ranks' models begin with different weights."""
    inputs, labels = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
    inputs[:, 0] = torch.arange(24) / 24
    torch.manual_seed(rank)
    model, own = nn.Linear(5, 3), []
    single = copy.deepcopy(model)
    for parameter in single.parameters():
        dist.broadcast(parameter.data, 0)
    model.register_forward_pre_hook(
        lambda _, taken: own.append((24 * taken[0][:, 0]).round().int().tolist())
    )
    train(model, inputs, labels, 6, 8)
    generator, optimizer = torch.Generator().manual_seed(0), torch.optim.AdamW(single.parameters(), lr=0.01)
    for step, parts in enumerate(zip(*gathered(own), strict=True)):
        rows = torch.randint(24, (8,), generator=generator)
        sizes, together, right = (
            [len(part) for part in parts],
            sorted(sum(parts, [])),
            sorted(rows.tolist()),
        )
        assert sizes == [4, 4], (
            f"In step {step} the ranks compute {sizes[0]} and {sizes[1]} of the batch's 8 rows."
        )
        assert together == right, (
            f"In step {step} the ranks compute the rows {together}, and one device {right}."
        )
        optimizer.zero_grad()
        cross_entropy(single(inputs[rows]), labels[rows]).backward()
        torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        optimizer.step()
    apart = (single.weight - model.weight).abs().max().item()
    assert apart < 1e-4, (
        f"Rank {rank} ends with other weights than one device that computes the same batches."
    )
