"""Test of the program in notebook 12: blocks that are computed twice, to keep less."""
# ruff: noqa: F821 - what the reader's program defines

import torch
from torch import nn

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


def test_11_3(rank, n):
    wanted, _, plain_peak = step_of(plain)
    own, calls, peak = step_of(forward)
    require_gradients(own, wanted, "In all blocks")
    called, share = f"Forward and backward called {calls} blocks", peak / plain_peak
    assert calls > 8, f"{called}, each once: nothing is computed twice."
    assert calls >= 15, f"{called}: some are computed only once."
    high = f"The peak is {share:.2f} times that of the plain blocks"
    assert share < 0.75, f"{high}: the backward pass computes too many blocks again before it frees any."
    return f"{called} instead of 8, at {share:.2f} times the peak memory."
