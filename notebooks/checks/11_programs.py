"""Tests of the programs in notebook 11, each of which repairs something that broke."""
# ruff: noqa: F821 - what the reader's program defines

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.helpers import gradients, require_gradients


def test_11_2(rank, n):
    """The losses are 1 and 2, and rank 0 knows the best one, 0.25."""
    mean, best = (round(float(value), 4) for value in finish(1.0 + rank, (0.25, 9.0)[rank], rank, n))
    assert mean != 3, f"Rank {rank} returns 3.0 for the losses 1 and 2: their sum."
    assert mean == 1.5, f"Rank {rank} returns {mean} as the mean of the losses 1 and 2."
    assert best == 0.25, f"Rank {rank} returns {best} as the best loss, and rank 0 knows 0.25."


def test_11_3(rank, n):
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


class Log(nn.Module):
    """A layer that gives NaN for negative numbers, and minus infinity for 0."""

    def forward(self, x):
        return x.log()


def test_11_4(rank, n):
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Identity()), nn.Sequential(nn.Identity(), Log()), nn.Softplus())
    assert (own := first_nan(model, torch.ones(2))) is None, f"All is finite, and first_nan returns {own!r}."
    own = first_nan(model, torch.tensor([1.0, -1.0]))
    assert own == "1.1", f"The log of 0, in 1.1, is the first; first_nan returns {own!r}."
    infinite = nn.Sequential(Log(), nn.ReLU())
    own = first_nan(infinite, torch.zeros(2))
    assert own == "0", f"Module 0 gives -inf, which isn't finite; first_nan returns {own!r}."
    left = sum(len(module._forward_hooks) for module in model.modules())
    assert not left, f"{left} hooks are left in the model: they would cost time in every step."
