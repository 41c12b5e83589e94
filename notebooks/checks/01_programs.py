"""Test of a program in notebook 01: recomputed layers."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn


def test_01_4(rank, n):
    torch.manual_seed(0)
    layer, x, passes = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(4, 8), []
    own, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = layer(plain)
    wanted.sin().sum().backward()
    right = [plain.grad, *(weight.grad for weight in layer.parameters())]
    layer.zero_grad()
    layer.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    output = Recompute.apply(layer, own)
    assert isinstance(output, torch.Tensor), f"Recompute.apply returns {output!r}, not the layer's output."
    assert torch.equal(output, wanted), "It doesn't return what the layer returns."
    assert passes == [False], "In forward the layer was called with a graph, which keeps its activations."
    output.sin().sum().backward()
    assert len(passes) == 2, f"The backward pass computed the layer {len(passes) - 1} times, not once more."
    gradients = [own.grad, *(weight.grad for weight in layer.parameters())]
    assert gradients[0] is not None, "x gets no gradient, so the layers before this one don't learn."
    assert all(gradient is not None for gradient in gradients), "The layer's weights get no gradient."
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, right, strict=True))
    assert same, (
        "The gradients aren't those of a plain call: the gradient that comes from above must go in."
    )
