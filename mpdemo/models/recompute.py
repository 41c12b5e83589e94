"""Activation checkpointing: keep only a block's input, and compute the block again when the backward pass needs it.

Taught in notebooks/11_which_one.ipynb. Source: https://arxiv.org/abs/1604.06174.
"""

from contextlib import nullcontext

from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint


def recomputed(block, x):
    """Return ``block(x)``, of which autograd keeps only x."""
    return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), StatisticsKept(block)))


class StatisticsKept:
    """Let a block compute without a change of its running statistics: this batch is in them already."""

    def __init__(self, block):
        self.norms = [module for module in block.modules() if isinstance(module, _NormBase)]

    def __enter__(self):
        self.buffers = [dict(norm.named_buffers(recurse=False)) for norm in self.norms]
        self._replace([{name: buffer.clone() for name, buffer in own.items()} for own in self.buffers])

    def __exit__(self, *error):
        self._replace(self.buffers)

    def _replace(self, buffers):
        for norm, own in zip(self.norms, buffers, strict=True):
            for name, buffer in own.items():
                setattr(norm, name, buffer)
