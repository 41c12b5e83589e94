"""Test of the program in notebook 76: Muon on sharded weights, with an owner for each matrix."""
# ruff: noqa: F821 - what the reader's program defines

import copy
import re
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from checks.helpers import gathered, wait_for_all


def polar(gradient):
    """Return a tenth of the nearest matrix with equal singular values, laid out as Muon's is: a tall one transposed."""
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    update = 0.1 * u @ v
    return update.T.contiguous().T if update.shape[0] > update.shape[1] else update


def sharded():
    """Return four matrices with odd numbers of rows, and their sharded twins, all with the same gradients."""
    torch.manual_seed(0)
    sizes = (5, 9, 3, 7, 3)
    one = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
    model = fully_shard(copy.deepcopy(one))
    for each in (one, model):
        each(torch.randn(8, 5, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    return list(one.parameters()), list(model.parameters())


def test_76_1(rank, n):
    wholes, weights = sharded()
    before, calls, alone = [whole.detach().clone() for whole in wholes], [], []

    def update(gradient):
        assert not isinstance(gradient, DTensor), (
            "update was given a DTensor: each product in it would communicate."
        )
        shape = "{} x {}".format(*gradient.shape)
        rows = f"update was given a matrix of {shape}, which no weight is: only a shard of its rows."
        assert any(gradient.shape == whole.shape for whole in wholes), rows
        calls.append(shape)
        try:
            wait_for_all(f"update {len(calls)}", 0.01 if alone else 3)
        except dist.DistStoreError:
            alone.append(
                f"While rank {rank} computes the update of {shape}, the other rank waits. Let both compute."
            )
        return polar(gradient)

    with CommDebugMode() as sent:
        step(weights, update)
    by_rank = gathered(calls)
    for name in {*sum(by_rank, [])}:
        twice = f"Each rank computes the update of the matrix of {name}. Its owner alone should."
        assert not all(name in names for names in by_rank), twice
    numbers = [len(names) for names in by_rank]
    assert sum(numbers), "No rank calls update."
    assert sum(numbers) == len(weights), (
        f"There are {len(weights)} matrices, and update was called {sum(numbers)} times."
    )
    assert min(numbers) == max(numbers), (
        f"Rank {numbers.index(max(numbers))} owns {max(numbers)} of the 4 matrices."
    )
    serial = sum(gathered(alone), [])
    assert not serial, serial[0]
    everyone = [
        str(name) for name in sent.get_comm_counts() if re.search("all_?gather|broadcast", str(name))
    ]
    assert not everyone, (
        f"{everyone[0]}: each rank gets all rows, but needs only its own of what others own."
    )
    assert all(isinstance(weight, DTensor) for weight in weights), "A weight isn't sharded any more."
    for number, (weight, whole, old) in enumerate(zip(weights, wholes, before, strict=True)):
        own, where = weight.full_tensor(), f"Weight {number}, {' x '.join(map(str, old.shape))},"
        moved, right = old - own, polar(whole.grad)
        for rows in moved.chunk(n):
            assert rows.any(), f"{where} hasn't changed in the {len(rows)} rows of some rank."
        assert not torch.allclose(moved, -right, atol=1e-5), (
            f"{where} goes uphill: the update is to be subtracted."
        )
        off = f"{where} differs from one device's by {(moved - right).abs().max():.3f}. Which rank has which rows?"
        assert torch.allclose(moved, right, atol=1e-5), off
