"""The models: flat lists of named blocks, each fed by the one before, so that cutting a model is slicing a list.

Parameters keep the name they have in the uncut model, so a stage's weights are found by name in any checkpoint.
The networks are in nets.py and transformer.py. Taught in notebooks/30_two_stages.ipynb. Shapes: B batch, C
channels, S image size (pixels).
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import nn


class Blocks(nn.Module):
    """A model, or a stage of one: named blocks applied one after the other.

    `blocks` is a dictionary in order of application. The name ``layer3.6`` gives the parameters
    ``layer3.6.conv1.weight`` and so on, as in torchvision: each dot opens a container.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = list(blocks)  # in order
        self.input_shape: tuple[int, int, int] | None = None  # (C, S, S) of an image, for a whole model
        for name, block in blocks.items():
            parent: nn.Module = self
            *containers, own = name.split(".")
            for container in containers:
                if not hasattr(parent, container):
                    parent.add_module(container, nn.Module())
                parent = getattr(parent, container)
            parent.add_module(own, block)

    def __len__(self) -> int:
        return len(self.names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all blocks: x (B, C, S, S) or an earlier stage's output -> this stage's output."""
        for block in self.blocks():
            x = block(x)
        return x.contiguous()

    def blocks(self) -> list[nn.Module]:
        """Return the blocks, in order."""
        return [self.get_submodule(name) for name in self.names]

    def some(self, names: Iterable[str]) -> "Blocks":
        """Return the blocks of these names as a model that shares their parameters."""
        return Blocks({name: self.get_submodule(name) for name in names})

    def stage(self, start: int, stop: int) -> "Blocks":
        """Return blocks ``start`` to ``stop`` (excluded) as a model that shares these parameters."""
        return self.some(self.names[start:stop])

    def cut(self, points: Iterable[int]) -> "list[Blocks]":
        """Cut before each block index in `points`: ``cut([3])`` gives blocks 0 to 2 and blocks 3 to the end."""
        return [self.stage(start, stop) for start, stop in pairwise([0, *points, len(self)])]
