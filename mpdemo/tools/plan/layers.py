"""What a reader's module is made of, and what it returns.

It may have a list of equal blocks, layers that FSDP divides, parameters with two names; and may return anything: the
tensors in it that have a gradient, and a loss of them, are found here.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from mpdemo.models.private_torch import tree_leaves

LISTS = nn.Sequential, nn.ModuleList, nn.ModuleDict
REPEATED = 3  # a list of so many layers of one kind is looked into, also inside another layer
FEW = 4, 5  # a longer list of equal blocks is counted by two shorter ones, of so many blocks


def equal_blocks(module) -> tuple:
    """Return the name of the list of equal blocks with most parameters, and its length; None and 0 if there is none."""
    found = []
    for name, part in module.named_modules():
        is_list = isinstance(part, LISTS) and len(part) > 1
        if (
            is_list
            and len({_kind(block) for block in blocks_in(part)}) == 1
            and any(True for _ in part.parameters())
        ):
            found.append((sum(p.numel() for p in part.parameters()), name, len(part)))
    return max(found)[1:] if found else (None, 0)


def blocks_in(part) -> list:
    """Return what is in a list of modules, or in a dictionary of them."""
    return list(part.values() if isinstance(part, nn.ModuleDict) else part)


def _kind(block) -> tuple:
    """Return what equal blocks have in common: classes, shapes and types; their numbers in the list may differ."""
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()
    )
    return tuple(type(part) for part in block.modules()), parameters


def layers_entered(module, compute) -> tuple:
    """Call a function that computes with a module; return its result, and the layers that FSDP divides one by one.

    These are layers that the module enters once, in order: a whole list, where the module has a list of lists. All of
    them have parameters, and these are used nowhere else: FSDP leaves others, such as an embedding's weight that is an
    output layer as well, to the module itself.
    """
    entered, uses, hooks = [], _Uses(), []
    for label in dict.fromkeys(_wide(module, label) for label in _layers(module)):
        layer = module.get_submodule(label)
        if own := list(layer.parameters()):
            uses.layer_of |= dict.fromkeys(map(id, own), layer)
            hooks.append(layer.register_forward_pre_hook(lambda *_, label=label: entered.append(label)))
            hooks.append(layer.register_forward_pre_hook(lambda layer, _: uses.inside.add(layer)))
            hooks.append(layer.register_forward_hook(lambda layer, *_: uses.inside.discard(layer)))
    try:
        with uses:
            outputs = compute()
    finally:
        for hook in hooks:
            hook.remove()
    once = [label for label in entered if entered.count(label) == 1]
    return outputs, [label for label in once if module.get_submodule(label) not in uses.outside]


class _Uses(TorchFunctionMode):
    """Note layers whose parameters are used while none of them computes."""

    def __init__(self):
        super().__init__()
        self.layer_of, self.inside, self.outside = {}, set(), set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):  # not a parameter's device, or its shape
            used = {self.layer_of.get(id(value)) for value in tree_leaves((args, kwargs))}
            self.outside |= used - self.inside - {None}
        return result


def _wide(module, label) -> str:
    """Return the layer of the module's own list that a layer is part of; of others the layer itself."""
    first, *rest = label.split(".")
    is_list = isinstance(module.get_submodule(first), LISTS) and len(rest) > 1
    inner = f"{first}.{rest[0]}" if is_list else label
    return inner if isinstance(module.get_submodule(inner), nn.Sequential) else label


def _layers(module, prefix="") -> list:
    """Return the names of children; of lists, and of layers that contain a long list, those of what is in them."""
    names = []
    for name, child in module.named_children():
        lists = [m for m in child.modules() if isinstance(m, LISTS) and len(m) >= REPEATED]
        alike = any(len({type(layer) for layer in layers.children()}) == 1 for layers in lists)
        names += (
            _layers(child, f"{prefix}{name}.") if isinstance(child, LISTS) or alike else [prefix + name]
        )
    return names


def shared(module) -> list:
    """Return the names of each parameter that has several."""
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def differentiable(value, seen=None):
    """Yield all tensors with a gradient in any output: of lists, dicts and other objects, and of what is in them."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
        return
    if id(value) in seen or isinstance(value, type | nn.Module):
        return
    seen.add(id(value))
    parts = list(value.values()) if isinstance(value, Mapping) else []
    parts += list(value) if isinstance(value, list | tuple | set) else []
    for part in parts or getattr(value, "__dict__", {}).values():
        yield from differentiable(part, seen)


def loss(tensors):
    """Return a loss that keeps what a usual one keeps: cross entropy over classes, or squares where there are none."""
    return sum(map(_loss, tensors))


def _loss(t):
    t = torch.view_as_real(t) if t.is_complex() else t
    t = t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
    t = t.flatten(0, 1) if t.dim() == 3 else t  # tokens of a sample
    if t.dim() < 2 or t.shape[1] == 1:
        return t.square().mean()
    return cross_entropy(t, torch.zeros(t.shape[0], *t.shape[2:], dtype=torch.long, device=t.device))
