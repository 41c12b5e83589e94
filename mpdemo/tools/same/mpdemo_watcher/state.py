"""What no optimizer holds: buffers, and tensors that the script writes in place, such as averages of the weights."""

import os

import torch
from torch import nn

from . import private_torch, rows, sketch
from .notes import ORDER, before, here, note, note_once, now, of_script

MOST, LARGE = 1000, 2**24  # tensors; elements of one
buffers = set()  # numbers of the storages of the models' own
written = {}  # by id: a tensor that was written in place outside of modules, backward passes and steps; and the line


def wrote(args):
    """Remember what a call writes in place; within a model its buffers alone."""
    if not now.steps and not now.weights or len(written) > MOST:
        return
    for tensor in args[0] if isinstance(args[0], list | tuple) else args[:1]:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
            whole = private_torch.whole_of(tensor)
            if whole.layout is torch.strided and not hasattr(whole, "placements"):
                key = storage_of(whole)
                if now.depth and key not in buffers:
                    continue
                again = (
                    key in written and private_torch.alive(written[key][0]) is not None
                )  # once is no average
                written[key] = private_torch.weak(whole), here(), again


def storage_of(tensor) -> int:
    """Return the number of the storage of a tensor, or of this rank's part of it."""
    return private_torch.number_of_storage(sketch.local_part(tensor).untyped_storage())


def found_now() -> dict:
    """Return buffers and tensors that are shaped as weights, by name, and the lines that wrote these and weights."""
    trained = [parameter for key, parameter in sketch.known.items() if sketch.is_trained(key)]
    known = [t for p in trained for t in (p, p.grad) if t is not None and t.layout is torch.strided]
    skip, shapes = set(map(storage_of, known)), {p.shape for p in trained}
    found, lines, copies = {}, {}, 0
    buffers.clear()
    for number, model in rows.models.values():
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and not hasattr(buffer, "placements"):
                key, known_as = storage_of(buffer), sketch.named(number, name)
                found[known_as] = row_of(buffer)
                lines |= {known_as: written[key][1]} if key in written else {}
                buffers.add(key)
    for key, (reference, line, again) in list(written.items()):
        tensor = private_torch.alive(reference)
        if tensor is None or key in skip | buffers:
            del written[key]
            lines |= {"weights": line} if key in skip and tensor is not None else {}
        elif again and tensor.shape in shapes and tensor.dim() > 1 and tensor.numel() < LARGE:
            copies += 1
            name = f"tensor {copies} of shape {list(tensor.shape)}"
            found[name], lines[name] = row_of(tensor), line
    return {"state": found, "lines": lines}


def row_of(tensor):
    """Return a tensor's sketch and its shape, or None if it has no numbers to compare."""
    values = sketch.sketch(tensor)
    return [*values[:3], str(list(tensor.shape))] if values else None


def watch():
    """Note what is saved."""
    before(torch, "save", saved)
    before(torch, "load", lambda *_, **__: note_once("load at", of_script()))


def saved(obj, f=None, *_, **__):
    """Note the tensors of a file, by their place in it."""
    if isinstance(f, (str, os.PathLike)) and not str(f).startswith(ORDER["notes"]):
        file, found = os.path.relpath(os.path.abspath(f), ORDER["cwd"]), {}
        flatten("", obj, found)
        note("saved", file=file, step=now.steps, where=of_script(), state=found)


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
