"""A reader's module as its author wrote it: its inputs, its outputs as rows, its layers, copies without values."""

import copy
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

LISTS = nn.Sequential, nn.ModuleList, nn.ModuleDict
REPEATED = 3  # a list of so many layers of one kind is looked into, also inside another layer


class WrappedModule(nn.Module):
    """A module as its author wrote it; one tensor goes in (other inputs are zeros), and rows come out."""

    precision, checkpointing = None, False

    def __init__(self, module, inputs):
        super().__init__()
        self.module, self.layers = module, []
        leaves, self.structure = tree_flatten(inputs)
        self.like = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.first = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))

    def forward(self, x):
        """Compute a batch: x (B, ...) -> (B, numbers of all outputs)."""
        for layer in self.blocks() if self.checkpointing else []:
            if not isinstance(layer.forward, partial):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        batch, leaves = self.like[self.first][0][0], list(self.like)
        for number, leaf in enumerate(self.like):
            if isinstance(leaf, tuple):
                size, kind = leaf
                size = (len(x), *size[1:]) if size[:1] == (batch,) else size
                leaves[number] = torch.zeros(size, dtype=kind, device=x.device)
        leaves[self.first] = x
        inputs = tree_unflatten(leaves, self.structure)
        with torch.autocast(x.device.type, self.precision, enabled=self.precision is not None):
            if isinstance(inputs, dict):
                return rows(self.module(**inputs), len(x))
            return rows(self.module(*(inputs if isinstance(inputs, list | tuple) else [inputs])), len(x))

    def blocks(self) -> list:
        """Return the layers that FSDP divides one by one, and that activation checkpointing computes twice."""
        return [self.module.get_submodule(name) for name in self.layers]


def rows(outputs, count):
    """Return all numbers of any outputs as one tensor (count, ...), from which a loss can be computed."""
    found = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    found = found or [t for t in vars(outputs).values() if isinstance(t, torch.Tensor)]
    if len(found) > 1 or found[0].dim() != 2:  # rows are left as they are: a view would keep them alive
        even = [t.dim() > 0 and t.numel() % count == 0 for t in found]
        found = [t.reshape(count if fits else 1, -1).expand(count, -1) for t, fits in zip(found, even, strict=True)]
    flat = found[0] if len(found) == 1 else torch.cat(found, 1)
    return flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat


def rows_of_block(block, inputs, outputs):
    """Turn what the last block returns into rows: a forward hook."""
    return rows(outputs, len(inputs[0]))


def without_values(template) -> nn.Module:
    """Return a copy of a module on the CPU, with uninitialised tensors: fake ones within ``FakeTensorMode``."""
    empty = {}
    for module in template.modules():
        for tensor in (*vars(module).values(), *module._buffers.values(), *module._parameters.values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in empty:
                fresh = torch.empty_like(tensor, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                empty[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
    return copy.deepcopy(template, empty)  # takes these for the tensors that it would copy


def layers_entered(module, compute) -> tuple:
    """Call a function that computes with a module; return its result, and the layers that FSDP divides one by one.

    These are layers that the module enters once, in order: a whole list, where the module has a list of lists. All of
    them have parameters.
    """
    entered, hooks = [], []
    for label in dict.fromkeys(_wide(module, label) for label in _layers(module)):
        layer = module.get_submodule(label)
        if any(True for _ in layer.parameters()):
            hooks.append(layer.register_forward_pre_hook(lambda *_, label=label: entered.append(label)))
    try:
        outputs = compute()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, [label for label in entered if entered.count(label) == 1]


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
        names += _layers(child, f"{prefix}{name}.") if isinstance(child, LISTS) or alike else [prefix + name]
    return names


def shared(module) -> list:
    """Return the names of each parameter that has several."""
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]
