"""A reader's module as its author wrote it: how it is found, its inputs, its outputs as rows, copies without values."""

import copy
import importlib.util
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mpdemo.errors import UserError, error_line
from mpdemo.models.split import quiet


class Whole(nn.Module):
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
    own = list(template.modules())
    hidden = [value for module in own for value in vars(module).values() if isinstance(value, nn.Module)]  # of a trace
    empty = {}
    for module in own + hidden:
        for tensor in (*vars(module).values(), *module._buffers.values(), *module._parameters.values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in empty:
                fresh = torch.empty_like(tensor, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                empty[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
    return copy.deepcopy(template, empty)  # takes these for the tensors that it would copy


def imported(name):
    """Return the function that ``package.module:function`` or ``./file.py:function`` names."""
    module, _, function = name.rpartition(":")
    if not (module and function):
        raise UserError(f"--model {name!r} is not allowed; allowed: package.module:function, or a model of this course")
    is_file, given = module.endswith(".py"), sys.argv
    folder = str(Path(module).resolve().parent) if is_file else os.getcwd()
    sys.path.insert(0, folder)
    sys.argv = [module]  # for a file that reads its own arguments
    try:
        at_path = importlib.util.spec_from_file_location
        spec = at_path(Path(module).stem, module) if is_file else importlib.util.find_spec(module)
        if spec is None:
            raise ModuleNotFoundError(f"no module named {module!r}")
        sys.modules[spec.name] = loaded = importlib.util.module_from_spec(spec)
        with quiet(), suppress(SystemExit):  # of a script that ends itself; what it defined before is there
            spec.loader.exec_module(loaded)
        return getattr(loaded, function)
    except Exception as error:  # the reader's own code
        raise UserError(
            f"--model {name} cannot be imported: {error_line(error)}; is it in this folder, or installed?"
        ) from None
    finally:
        sys.path.remove(folder)
        sys.argv = given


def called(function, name) -> tuple:
    """Return the module that a function makes, and the inputs; None where it gives no inputs."""
    try:
        with quiet():
            made = function()
    except (Exception, SystemExit) as error:  # the reader's own code
        raise UserError(
            f"--model {name}() ends with {error_line(error)}; allowed: a function without arguments"
        ) from None
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    module = module._orig_mod if isinstance(module, OptimizedModule) else module
    if not isinstance(module, nn.Module):
        raise UserError(f"--model {name}() returns {type(module).__name__}; allowed: a torch.nn.Module")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UserError(f"--model {name}() returns a scripted module, whose code cannot be followed; allowed: the "
                        "module before torch.jit.script")  # fmt: skip
    return module, inputs
