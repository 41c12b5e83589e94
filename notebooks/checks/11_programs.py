"""Test of the program in notebook 11: blocks that are computed twice, to keep less."""
# ruff: noqa: F821 - what the reader's program defines

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that operations make in a ``with`` block; `peak` is the most at one time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self.known:
                self.known.add(storage)
                weakref.finalize(storage, self.change, -storage.nbytes())
                self.change(storage.nbytes())
        return result

    def change(self, size):
        self.live += size
        self.peak = max(self.peak, self.live)


def step_of(forward):
    """Return the gradients of a step on eight blocks, the calls of a block, the bytes at the peak, the shape."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    calls, images = [], torch.randn(512, 64)
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    with Peak() as memory:
        outputs = forward(blocks, images)
        if outputs.requires_grad:
            outputs.square().mean().backward()
    return ([p.grad for block in blocks for p in block.parameters()], len(calls), memory.peak, outputs.shape)


def plain(blocks, outputs):
    for block in blocks:
        outputs = block(outputs)
    return outputs


def test_11_3(rank, n):
    wanted, _, plain_peak, plain_shape = step_of(plain)
    own, calls, peak, shape = step_of(forward)
    assert shape == plain_shape, "The result has another shape than the blocks give, one after the other."
    missing = sum(gradient is None for gradient in own)
    assert not missing, f"{missing} of the parameters got no gradient."
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(own, wanted, strict=True))
    assert apart < 1e-4, "The gradients aren't those of the plain blocks."
    called, share = f"Forward and backward called {calls} blocks", peak / plain_peak
    assert calls > 8, f"{called}, each once: nothing is computed twice."
    assert calls >= 15, f"{called}: some are computed only once."
    high = f"The peak is {share:.2f} times that of the plain blocks"
    assert share < 0.75, f"{high}: the backward pass computes too many blocks again before it frees any."
    return f"{called} instead of 8, at {share:.2f} times the peak memory."
