"""The models: flat lists of named blocks, so that cutting a model is slicing a list.

A pipeline needs to cut a network between two layers. A network that is written as a list of blocks, each fed
by the one before, can be cut anywhere: ``blocks[:k]`` is the first stage and ``blocks[k:]`` the second.
Parameters keep the name they have in the uncut model, so a stage's weights are found by name in any checkpoint.

The networks are in nets.py and transformer.py. Taught in notebooks/04_model_parallel.ipynb. Shapes: B batch, C
channels, S image size (pixels).
"""

from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """A model, or a stage of one: named blocks applied one after the other.

    `blocks` is a dictionary in order of application. The name ``layer3.6`` gives the parameters
    ``layer3.6.conv1.weight`` and so on, as in torchvision: each dot opens a container.
    """

    def __init__(self, blocks):
        super().__init__()
        self.names = list(blocks)  # in order
        self.precision = None  # torch.dtype that autocast uses, None for plain float32
        self.checkpointing = False  # whether the backward pass computes every block once more
        self.channels_last = False  # whether the channels of a pixel lie side by side in memory
        self.input_shape = None  # (C, S, S) of an image, for a whole model
        self.last = self.names[-1]  # of the whole model: its output is float32, so that the loss is not in bf16
        for name, block in blocks.items():
            parent = self
            for container in name.split(".")[:-1]:
                if not hasattr(parent, container):
                    parent.add_module(container, nn.Module())
                parent = getattr(parent, container)
            parent.add_module(name.split(".")[-1], block)

    def __len__(self):
        return len(self.names)

    def forward(self, x):
        """Apply all blocks: x (B, C, S, S) or an earlier stage's output -> this stage's output."""
        twice = self.checkpointing and torch.is_grad_enabled()
        if self.channels_last and x.dim() == 4:
            x = ChannelsLast.apply(x)
        with torch.autocast(x.device.type, self.precision, enabled=self.precision is not None):
            for name in self.names:
                block = self.get_submodule(name)
                x = recomputed(block, x) if twice else block(x)
        x = x.float() if self.names[-1] == self.last else x
        return x.contiguous()  # a tensor that is sent to another rank must be contiguous

    def blocks(self) -> list[nn.Module]:
        """Return the blocks, in order."""
        return [self.get_submodule(name) for name in self.names]

    def some(self, names) -> "Blocks":
        """Return the blocks of these names as a model that shares their parameters."""
        part = Blocks({name: self.get_submodule(name) for name in names})
        part.precision, part.checkpointing = self.precision, self.checkpointing
        part.channels_last, part.last = self.channels_last, self.last
        return part

    def stage(self, start, stop) -> "Blocks":
        """Return blocks ``start`` to ``stop`` (excluded) as a model that shares these parameters."""
        return self.some(self.names[start:stop])

    def cut(self, points) -> "list[Blocks]":
        """Cut before each block index in `points`: ``cut([3])`` gives blocks 0 to 2 and blocks 3 to the end."""
        return [self.stage(start, stop) for start, stop in pairwise([0, *points, len(self)])]


class ChannelsLast(torch.autograd.Function):
    """Store images (B, C, H, W) pixel by pixel, so that the channels of a pixel lie side by side."""

    @staticmethod
    def forward(ctx, x):
        """Return the same images in the other layout."""
        return x.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient in the layout of x: a tensor that is sent to another rank must be contiguous."""
        return gradient.contiguous()


def recomputed(block, x):
    """Return ``block(x)``, of which autograd keeps only x: the backward pass computes the block again.

    Taught in notebooks/11_which_one.ipynb. Source: https://arxiv.org/abs/1604.06174.
    """
    return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), StatisticsKept(block)))


class StatisticsKept:
    """Let a block compute without a change of its running statistics: this batch is in them already.

    A class, since a backward pass in two parts (inputs, then weights) enters it twice.
    """

    def __init__(self, block):
        self.norms = [module for module in block.modules() if isinstance(module, _NormBase)]

    def __enter__(self):
        self.kept = [(norm, name, buffer) for norm in self.norms for name, buffer in norm.named_buffers(recurse=False)]
        for norm, name, buffer in self.kept:
            setattr(norm, name, buffer.clone())

    def __exit__(self, *error):
        for norm, name, buffer in self.kept:
            setattr(norm, name, buffer)
