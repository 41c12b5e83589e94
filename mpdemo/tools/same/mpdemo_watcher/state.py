"""State that no optimizer holds: buffers, averaged copies of the weights, queues, statistics, a scaler's scale.

It is found from the variables of the reader's functions that run when an optimizer steps, under the reader's names.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from . import private_torch, rows, sketch, where
from .notes import ORDER, before, note, now

# levels of objects, tensors of a step, elements of one, seconds
DEEP, MOST, LARGE, LONG = 3, 1000, 2**24, 1.0
NONE = (Optimizer, DataLoader, Dataset, Sampler)  # hold what is compared elsewhere, or the data
marks = {}  # by path: what a tensor was at the last step


class Walk:
    """What is found from some variables: by path the sketch of a tensor, and its shape."""

    def __init__(self):
        trained = [parameter for key, (_, parameter) in sketch.known.items() if sketch.is_trained(key)]
        self.seen = {id(thing) for p in trained for thing in (p, p.grad) if thing is not None}
        self.shapes = {p.shape for p in trained}  # a copy has the same ones
        self.trained = {private_torch.number_of_storage(rows.local(p).untyped_storage()) for p in trained}
        # of modules; of whole models; of the reader's objects
        self.buffers, self.copies, self.other = {}, {}, {}

    def visit(self, path, thing, depth=0, keep=None):
        """Look at an object and at what it holds; `keep` is where its tensors go."""
        if id(thing) in self.seen or depth > DEEP or isinstance(thing, NONE) or len(self.copies) > MOST:
            return
        if isinstance(thing, torch.Tensor):
            self.add(path, thing, keep)
            return
        self.seen.add(id(thing))
        if isinstance(thing, nn.Module):
            self.module(path, thing)
        elif isinstance(thing, torch.amp.GradScaler):
            self.buffers[f"{path}.scale"] = number(thing.get_scale())
        elif isinstance(thing, dict | list | tuple) and len(thing) <= MOST:
            self.container(path, thing, depth, keep)
        elif is_own(thing):
            for name, value in list(vars(thing).items()):
                self.visit(f"{path}.{name}", value, depth + 1, self.other)

    def container(self, path, thing, depth, keep):
        """Look into a list or dictionary; one whose tensors are all shaped as weights is a copy of them."""
        items = [
            (str(key), value)
            for key, value in (thing.items() if isinstance(thing, dict) else enumerate(thing))
        ]
        tensors = [value for _, value in items if isinstance(value, torch.Tensor)]
        copy = len(tensors) > 1 and all(value.shape in self.shapes for value in tensors)
        for name, value in items:
            self.visit(f"{path}.{name}", value, depth + 1, self.copies if copy else keep)

    def module(self, path, model):
        """Take a module's buffers, and parameters that nothing trains."""
        for keep, tensors in (
            (self.buffers, model.named_buffers()),
            (self.copies, model.named_parameters()),
        ):
            for name, value in tensors:
                if not sketch.is_trained(id(value)):
                    self.add(f"{path}.{sketch.plain(name)}", value, keep)
        for name, child in model.named_modules():
            if is_own(child):
                for key, value in list(vars(child).items()):
                    if isinstance(value, torch.Tensor):
                        self.add(".".join(filter(None, (path, sketch.plain(name), key))), value, self.other)

    def add(self, path, tensor, keep):
        """Take one tensor, if its numbers can be compared."""
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if (
            keep is None
            or not plain
            or not tensor.is_floating_point()
            or tensor.is_meta
            or id(tensor) in self.seen
        ):
            return
        if tensor.numel() > LARGE or tensor.requires_grad:
            return
        self.seen.add(id(tensor))
        # no copy, but the weights
        if private_torch.number_of_storage(tensor.untyped_storage()) in self.trained:
            return
        if keep is self.other and not has_changed(path, tensor):
            return
        if row := row_of(tensor):
            keep[path] = row


def row_of(tensor):
    """Return a tensor's sketch and its shape, or None if it has no numbers to compare."""
    values = sketch.sketch(tensor)
    return [*values[:3], str(list(tensor.shape))] if values else None


def number(value) -> list:
    return [value**2, value, value, "[]"]


def is_own(thing) -> bool:
    """Whether the class of an object is the reader's."""
    module = type(thing).__module__
    return module == "__main__" or bool(
        where.own(getattr(sys.modules.get(module), "__file__", None) or "<none>")
    )


def has_changed(path, tensor) -> bool:
    """Whether another tensor was here at the last step, or other values: data stays as it is."""
    mark, old = (id(tensor), private_torch.version(tensor)), marks.get(path)
    marks[path] = mark
    return old is not None and old != mark and tensor.numel() > 1


def found_now() -> dict:
    """Return the state at this step."""
    if now.slow:
        return {"buffers": {}, "copies": {}, "other": {}}
    start, walk = time.monotonic(), Walk()
    for frame in list(where.frames())[::-1]:
        for name, thing in list(frame.f_locals.items()):
            walk.visit(name, thing, keep=walk.other if isinstance(thing, torch.Tensor) else None)
    now.slow = time.monotonic() - start > LONG
    return {"buffers": walk.buffers, "copies": walk.copies, "other": walk.other}


def watch():
    """Note what is saved, too."""
    before(torch, "save", saved)


def saved(obj, f=None, *_, **__):
    """Note the tensors of a file, by their place in it."""
    if isinstance(f, (str, os.PathLike)) and not str(f).startswith(ORDER["notes"]):
        file, found = os.path.relpath(os.path.abspath(f), ORDER["cwd"]), {}
        flatten("", obj, found)
        note("saved", file=file, step=now.steps, where=where.here(), state=found)


def flatten(path, thing, found, depth=0):
    """Find the tensors in what is saved."""
    if depth > 6 or len(found) > MOST:
        return
    if isinstance(thing, nn.Module):
        thing = thing.state_dict()
    if isinstance(thing, dict | list | tuple):
        items = thing.items() if isinstance(thing, dict) else enumerate(thing)
        for key, value in items:
            flatten(f"{path}.{key}" if path else str(key), value, found, depth + 1)
    elif isinstance(thing, torch.Tensor) and thing.is_floating_point() and not thing.is_meta:
        found[path] = None if hasattr(thing, "placements") else row_of(thing)
