"""Tests of the programs in notebook 12: recompute blocks, and the logits of a few tokens at a time, to keep less."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checks.helpers import require_gradients
from mpdemo.plan.counting import LiveMemory


def step_of(forward):
    """Return the gradients of a step on eight blocks, the calls of a block, and the step's own bytes at the peak."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    calls, images = [], torch.randn(512, 64)
    weights = [weight for block in blocks for weight in block.parameters()]
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    with LiveMemory() as memory:
        for tensor in (images, *weights):
            tensor.detach()  # so that it is counted now, not as a part of the step
        before = memory.live["cpu"]
        outputs = forward(blocks, images)
        outputs.square().mean().backward()
    return [weight.grad for weight in weights], len(calls), memory.peak() - before


def plain(blocks, outputs):
    for block in blocks:
        outputs = block(outputs)
    return outputs


def test_12_2(rank, n):
    wanted, _, plain_peak = step_of(plain)
    own, calls, peak = step_of(forward)
    require_gradients(own, wanted, "In all blocks")
    called, share = f"Forward and backward called {calls} blocks", peak / plain_peak
    assert calls > 8, f"{called}, each once: nothing is recomputed."
    assert calls >= 15, f"{called}: some are computed only once."
    high = f"The peak is {share:.2f} times that of the plain blocks"
    assert share < 0.75, f"{high}: the backward pass computes too many blocks again before it frees any."
    return f"{called} instead of 8, at {share:.2f} times the peak memory."


def loss_of(loss):
    """Return a loss, its gradients, and the bytes at the peak of the step."""
    torch.manual_seed(0)
    head, x, targets = nn.Linear(16, 5000, bias=False), torch.randn(500, 16), torch.randint(5000, (500,))
    x.requires_grad_()
    with LiveMemory() as memory:
        value = loss(head, x, targets)
        value.backward()
    return value.item(), [head.weight.grad, x.grad], memory.peak()


def test_12_3(rank, n):
    right, wanted, whole = loss_of(lambda head, x, targets: cross_entropy(head(x), targets))
    value, own, peak = loss_of(loss)
    assert abs(value - right) < 1e-4, f"The loss is {value:.4f}; of all 500 tokens at once it is {right:.4f}."
    require_gradients(own, wanted, "With parts")
    share = peak / whole
    assert share < 0.35, f"The peak is {share:.2f} times that of all logits at once: the parts' logits stay."
    return f"The same loss and gradients, at {share:.2f} times the peak memory."
