"""Test of a program in sitting 40: recomputed layers, with dropout."""
# ruff: noqa: F821 - what the reader's program defines

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from checks.helpers import ready_made, substitute


def test_40_1(rank, n):
    substitute(program, torch.utils.checkpoint, "checkpoint", ready_made)
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 8))
        x = torch.randn(4, 8)
        right, wanted, drawn = step(layer, x.clone().requires_grad_(), layer)
        gradients, output, later = recomputed(layer, x.clone().requires_grad_())
        assert torch.equal(output, wanted), "It doesn't return what the layer returns."
        assert gradients[0] is not None, "x gets no gradient, so the layers before this one don't learn."
        assert all(gradient is not None for gradient in gradients), "The layer's weights get no gradient."
        same = all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, right, strict=True)
        )
        assert same or not dropout, (
            "Only with dropout the gradients are wrong: which zeros did each pass draw?"
        )
        assert same, (
            "The gradients aren't those of a plain call: the gradient that comes from above must go in."
        )
        assert later == drawn, (
            "After the backward pass the next random number isn't a plain run's: put back the state that you found."
        )
    behind_a_layer(layer.eval())


def behind_a_layer(layer):
    """Require that the backward pass of a recomputed layer ends at its input, which another layer has made."""
    first, x = nn.Linear(8, 8), torch.randn(4, 8)
    wanted = torch.autograd.grad(layer(first(x)).sum(), first.weight)[0]
    try:
        Recompute.apply(layer, first(x)).sum().backward()
    except RuntimeError as error:
        assert "second time" not in str(error), (
            "If another layer has made x, your backward pass runs on into that layer: detach x."
        )
        raise
    assert torch.allclose(first.weight.grad, wanted), "The layer that has made x gets another gradient."


def step(layer, x, forward):
    """Return the gradients of a step, the output, and a random number that is drawn after it."""
    layer.zero_grad()
    torch.manual_seed(1)
    output = forward(x)
    assert isinstance(output, torch.Tensor), f"Recompute.apply returns {output!r}, not the layer's output."
    torch.rand(3)  # as later layers do
    output.sin().sum().backward()
    return [x.grad, *(weight.grad for weight in layer.parameters())], output, torch.rand(1).item()


def recomputed(layer, x):
    """Do a step with the reader's program, and require that it computes the layer twice, and saves its input."""
    passes, saved = [], []
    watching = layer.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))

    def forward(x):
        with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
            output = Recompute.apply(layer, x)
        graph = " with a graph, which keeps its activations" * any(passes)
        assert passes == [False], (
            f"In forward the layer was called {len(passes)} times{graph}, not once without."
        )
        more = [tuple(tensor.shape) for tensor in saved if tensor.data_ptr() != x.data_ptr()]
        assert not more, f"Beside x, it saves a tensor of the shape {more[0]}."
        return output

    result = step(layer, x, forward)
    watching.remove()
    assert len(passes) == 2, f"The backward pass computed the layer {len(passes) - 1} times, not once more."
    return result
