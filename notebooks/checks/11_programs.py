"""Tests of the programs in notebook 11, each of which repairs something that broke."""
# ruff: noqa: F821 - what the reader's program defines

import argparse
import copy
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.helpers import gathered, gradients, require_gradients


def test_10_2(rank, n):
    """The losses are 1 and 2, and rank 0 knows the best one, 0.25."""
    mean, best = (round(float(value), 4) for value in finish(1.0 + rank, (0.25, 9.0)[rank], rank, n))
    assert mean != 3, f"Rank {rank} returns 3.0 for the losses 1 and 2: their sum."
    assert mean == 1.5, f"Rank {rank} returns {mean} as the mean of the losses 1 and 2."
    assert best == 0.25, f"Rank {rank} returns {best} as the best loss, and rank 0 knows 0.25."


def test_10_3(rank, n):
    torch.manual_seed(rank)
    batches, model, seen = [torch.randn(4, 2) for _ in range((3, 5)[rank])], nn.Linear(2, 1), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    ddp = DistributedDataParallel(model)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), batches)
    wait_for_all()
    used = sum(any(torch.equal(batch, one) for one in seen) for batch in batches)
    assert used == len(batches), f"Rank {rank} trained on {used} of its {len(batches)} batches."
    first, second = gathered([round(number, 5) for number in model.weight.flatten().tolist()])
    assert first == second, "Both ranks used all their batches, and have different weights now."


class TwoHeads(nn.Module):
    """A trunk and two heads, of which a forward pass uses one."""

    def __init__(self):
        super().__init__()
        self.trunk, self.heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, inputs, head):
        return self.heads[head](torch.tanh(self.trunk(inputs)))


def test_10_4(rank, n):
    torch.manual_seed(0)
    model, inputs = TwoHeads(), torch.randn(8, 3)
    reference, wrapped = copy.deepcopy(model), wrap(model)
    for step, head in enumerate((0, 1, 0), 1):
        model.zero_grad()
        reference.zero_grad()
        reference(inputs, head).square().mean().backward()
        wrapped(inputs[rank::n], head).square().mean().backward()
        for own, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            own, wanted = (torch.zeros_like(p) if p.grad is None else p.grad for p in (own, wanted))
            wrong = f"In step {step}, the gradients of rank {rank} aren't the mean over both ranks."
            assert torch.allclose(own, wanted, atol=1e-6), wrong


def test_10_5(rank, n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))
    images, first = torch.randn(8, 1, 6, 6), model[0].weight.clone()
    repaired = repair(model)
    assert "BatchNorm" not in str(repaired), "There is still a batch norm, with the mean of one rank's images."
    assert "Norm" in str(repaired), "No layer normalizes any more: it is another model, which trains worse."
    assert torch.equal(repaired[0].weight, first), "The other layers have new weights."
    reference = copy.deepcopy(repaired)
    reference(images).square().mean().backward()
    ddp = DistributedDataParallel(repaired)
    ddp(images[rank::n]).square().mean().backward()
    require_gradients(gradients(repaired), gradients(reference), f"On rank {rank}")


class Intruder:
    """An object whose pickle calls a function when it is loaded: here one that only leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_10_6(rank, n):
    options = argparse.Namespace(lr=0.5)
    torch.save({"weight": torch.ones(2), "options": options}, folder / "good.pt")
    torch.save({"weight": torch.ones(2), "options": Intruder(str(folder / "ran"))}, folder / "bad.pt")
    with suppress(Exception):  # the reader's program may fail in any way, here and below
        load(folder / "bad.pt")
    assert not (folder / "ran").exists(), "A file from elsewhere called a function of its own while it was loaded."
    try:
        found = load(folder / "good.pt")
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).partition('. ')[0][:80]}"
        raise AssertionError(f"The file of weights and options can't be loaded: {said}.") from None
    good = found["weight"].tolist() == [1, 1] and found["options"] == options
    assert good, "The weights or the options of the file are lost."
