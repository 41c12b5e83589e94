"""Tests of the programs in notebook 45: a mesh of two dimensions."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn

from checks.helpers import gathered, require_gradients


def test_45_1(rank, n):
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(8, 4)
    right = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
    mesh = backward(model, batch, 2, 2)
    partners = gathered(mesh["tensor"].mesh.tolist())[0]
    assert partners == [0, 1], (
        f"Rank 0 splits layers with rank {partners[-1]}, which is on the other node, so the activations of every layer "
        "cross the network."
    )
    stored = model[0].weight.to_local().numel()
    assert stored == 8, f"Each rank stores {stored} of the 32 weights of the first layer, not a quarter."
    grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
    require_gradients(
        grads, right, f"On rank {rank}", "Do both ranks of a tensor-parallel group get the same samples?"
    )
