"""Test of the program in notebook 74: recompute blocks, to keep less."""
# ruff: noqa: F821 - what the reader's program defines

import sys
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from checks.helpers import SCRIPTS, require_gradients
from mpdemo.predict.counting import LiveMemory


class Calls(TorchDispatchMode):
    """Counts the calls of every operator, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

    def of(self, kind):
        return sum(
            number for name, number in self.counts.items() if kind in name and "backward" not in name
        )


def step_of(forward):
    """Return the gradients of a step on eight blocks, the calls of every operator, and the step's own peak of bytes."""
    sys.path.append(str(SCRIPTS))
    import gpt

    torch.manual_seed(0)
    blocks, tokens = [gpt.Block(64, heads=4) for _ in range(8)], torch.randn(4, 64, 64)
    weights = [weight for block in blocks for weight in block.parameters()]
    with LiveMemory() as memory:
        for tensor in (tokens, *weights):
            tensor.detach()  # so that it is counted now, not as a part of the step
        before = memory.live["cpu"]
        forward(blocks, tokens).square().mean().backward()
    own = [weight.grad for weight in weights]
    with Calls() as calls:
        forward(blocks, tokens).square().mean().backward()
    return own, calls, memory.peak() - before


def plain(blocks, outputs):
    for block in blocks:
        outputs = block(outputs)
    return outputs


def test_74_1(rank, n):
    wanted, once, plain_peak = step_of(plain)
    own, calls, peak = step_of(forward)
    require_gradients(own, wanted, "In all blocks")
    products, attentions = (calls.of(kind) - once.of(kind) for kind in ("mm", "attention"))
    share = f"The peak is {peak / plain_peak:.2f} times that of the plain blocks"
    assert calls.of("gelu") > 8, f"{share}: nothing is recomputed."
    twice = f"{share}, but the backward pass repeats"
    assert products == 0, f"{twice} {products} matrix products."
    assert attentions == 0, f"{twice} {attentions} attentions. What is the operator called on this device?"
    assert peak < 0.75 * plain_peak, (
        f"{share}: the backward pass recomputes too many blocks before it frees any."
    )
    return f"{share}, and no matrix product and no attention is repeated."
