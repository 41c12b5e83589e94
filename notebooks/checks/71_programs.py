"""Test of the program in notebook 71: the logits of a few tokens at a time, to keep less."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import require_gradients
from mpdemo.predict.counting import LiveMemory


def loss_of(loss):
    """Return a loss, its gradients, and the bytes at the peak of the step."""
    torch.manual_seed(0)
    head, x, targets = nn.Linear(16, 5000, bias=False), torch.randn(500, 16), torch.randint(5000, (500,))
    x.requires_grad_()
    with LiveMemory() as memory:
        value = loss(head, x, targets)
        value.backward()
    return value.item(), [head.weight.grad, x.grad], memory.peak()


def test_71_1(rank, n):
    right, wanted, whole = loss_of(lambda head, x, targets: cross_entropy(head(x), targets))
    value, own, peak = loss_of(loss)
    assert abs(value - right) < 1e-4, (
        f"The loss is {value:.4f}; of all 500 tokens at once it is {right:.4f}."
    )
    require_gradients(own, wanted, "With parts")
    share = peak / whole
    assert share < 0.2, (
        f"The peak is {share:.2f} times that of all logits at once: the parts' logits stay, or a part is too large."
    )
    return f"The same loss and gradients, at {share:.2f} times the peak memory."
