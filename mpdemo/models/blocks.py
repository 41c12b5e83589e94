"""The models: flat lists of named blocks, so that cutting a model is slicing a list.

A pipeline needs to cut a network between two layers. A network that is written as a list of blocks, each fed
by the one before, can be cut anywhere: ``blocks[:k]`` is the first stage and ``blocks[k:]`` the second.
Parameters keep the name they have in the uncut model, so a stage's weights are found by name in any checkpoint.

The networks are in nets.py. Taught in notebooks/04_model_parallel.ipynb. Shapes: B batch, C channels, S image size
(pixels).
"""

from itertools import pairwise

import torch
from torch import nn

from mpdemo.errors import UserError


class Blocks(nn.Module):
    """A model, or a stage of one: named blocks applied one after the other.

    Parameters
    ----------
    blocks : dict of str to nn.Module
        In order of application. The name ``layer3.6`` gives the parameters ``layer3.6.conv1.weight`` and so on,
        as in torchvision: each dot opens a container.

    Attributes
    ----------
    names : list of str
        The blocks' names, in order.
    """

    def __init__(self, blocks):
        super().__init__()
        self.names = list(blocks)
        self.precision = None  # torch.dtype that autocast uses, None for plain float32
        self.input_shape = None  # (C, S, S) of an image, for a whole model
        for name, block in blocks.items():
            *containers, leaf = name.split(".")
            parent = self
            for container in containers:
                if not hasattr(parent, container):
                    parent.add_module(container, nn.Module())
                parent = getattr(parent, container)
            parent.add_module(leaf, block)

    def __len__(self):
        return len(self.names)

    def forward(self, x):
        """Apply all blocks: x (B, C, S, S) or an earlier stage's output -> this stage's output."""
        with torch.autocast(x.device.type, self.precision, enabled=self.precision is not None):
            for name in self.names:
                x = self.get_submodule(name)(x)
        return x.contiguous()  # a tensor that is sent to another rank must be contiguous

    def stage(self, start, stop) -> "Blocks":
        """Return blocks ``start`` to ``stop`` (excluded) as a model that shares these parameters."""
        part = Blocks({name: self.get_submodule(name) for name in self.names[start:stop]})
        part.precision = self.precision
        return part

    def cut(self, points) -> "list[Blocks]":
        """Cut before each block index in `points`: ``cut([3])`` gives blocks 0 to 2 and blocks 3 to the end."""
        return [self.stage(start, stop) for start, stop in pairwise([0, *points, len(self)])]


def resolve_cut(names, cut, stages) -> list[int]:
    """Turn a cut as a user writes it into block indices.

    Parameters
    ----------
    names : list of str
        The model's block names.
    cut : None, str or sequence of (str or int)
        Where each stage but the last ends: the name of its last block (``layer2.3``), or the number of blocks up to
        there (``9``), separated by commas. None: stages of equally many blocks.
    stages : int
        How many stages the cut must give.

    Returns
    -------
    list of int
        ``stages - 1`` indices, each the first block of the next stage.

    Raises
    ------
    UserError
        More stages than blocks; a name that is not a block; not increasing; a stage left empty; the wrong number.
    """
    count = len(names)
    if stages > count:
        raise UserError(f"{stages} stages do not fit a model of {count} blocks; allowed: 1 to {count}")
    if cut in (None, ""):
        return [round(count * i / stages) for i in range(1, stages)]
    points = [_cut_point(names, entry) for entry in (cut.split(",") if isinstance(cut, str) else cut)]
    if len(points) != stages - 1:
        raise UserError(f"the cut {cut!r} gives {len(points) + 1} stages, but {stages} are wanted: name {stages - 1}")
    if any(start >= stop for start, stop in pairwise([0, *points, count])):
        raise UserError(
            f"the cut {cut!r} leaves a stage empty or is not increasing (block numbers {points}); "
            f"allowed: increasing, from 1 to {count - 1}"
        )
    return points


def _cut_point(names, entry) -> int:
    """Return the number of blocks before a cut, from a block's name (cut after it) or from a number."""
    entry = str(entry).strip()
    if entry in names:
        return names.index(entry) + 1
    if entry.isdecimal() and 1 <= int(entry) < len(names):
        return int(entry)
    raise UserError(
        f"cannot cut after {entry!r}; allowed: a number from 1 to {len(names) - 1} or a block: {', '.join(names[:-1])}"
    )
