"""Tests of the programs in notebook 62: a model that trains right on two ranks, and the module of a NaN."""
# ruff: noqa: F821 - what the reader's program defines

import copy
import re

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.helpers import gradients, require_gradients


def test_62_1(rank, n):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), block, nn.Flatten(), nn.Linear(6 * 4, 3)
    )
    images, kept = torch.randn(8, 1, 6, 6), [weight.clone() for weight in weights_of(model)]
    repaired = repair(model)
    assert "BatchNorm" not in str(repaired), (
        "There is still a batch norm, with the mean of one rank's images."
    )
    normed = len(re.findall("Norm", str(repaired)))
    assert normed >= 2, (
        f"Of the model's 2 norms {normed} are left: it is another model, which trains worse."
    )
    assert all(map(torch.equal, weights_of(repaired), kept)), "The other layers have new weights."
    reference = copy.deepcopy(repaired)
    reference(images).square().mean().backward()
    ddp = DistributedDataParallel(repaired)
    ddp(images[rank::n]).square().mean().backward()
    require_gradients(gradients(repaired), gradients(reference), f"On rank {rank}")


def weights_of(model):
    """Return the weights of a model's convolutions and linear layers."""
    return [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


class Log(nn.Module):
    """A layer that gives NaN for negative numbers, and minus infinity for 0."""

    def forward(self, x):
        return x.log()


def test_62_2(rank, n):
    model = nn.Sequential(
        nn.Sequential(nn.ReLU(), nn.Identity()), nn.Sequential(nn.Identity(), Log()), nn.Softplus()
    )
    assert (own := first_nan(model, torch.ones(2))) is None, (
        f"All is finite, and first_nan returns {own!r}."
    )
    own = first_nan(model, torch.tensor([1.0, -1.0]))
    assert own == "1.1", f"The log of 0, in 1.1, is the first; first_nan returns {own!r}."
    infinite = nn.Sequential(Log(), nn.ReLU())
    own = first_nan(infinite, torch.zeros(2))
    assert own == "0", f"Module 0 gives -inf, which isn't finite; first_nan returns {own!r}."
    left = sum(len(module._forward_hooks) for module in model.modules())
    assert not left, f"{left} hooks are left in the model: they would cost time in every step."
