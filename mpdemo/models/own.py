"""A reader's own model as a flat list of blocks: ``package.module:function``, where the function returns a module.

It is split by `mpdemo.models.split`. Where that does not work the model stays one block, and `OwnModel.uncut` says
why. Used by ``python -m mpdemo plan --model``; taught in notebooks/11_which_one.ipynb.
"""

import copy
import importlib
import os
import sys
from functools import cached_property

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from mpdemo.errors import UserError, error_line
from mpdemo.models.blocks import Blocks
from mpdemo.models.split import blocks_of, each_with_parameters, layers_in_order, quiet, traced

SAMPLES = 2  # of the batch on which a model is tried


class OwnModel:
    """A model that can be built for batches of any size, its weights without values.

    Parameters
    ----------
    name : str
        ``package.module:function``, a function without arguments; the current folder is searched first.
    input_shape : tuple of int
        Of one sample: (C, S, S) of an image, (T,) of a row of tokens.
    tokens : bool
        Whether the samples are whole numbers (the model begins with an embedding).

    Attributes
    ----------
    uncut : str
        Why the model is one block; "" where it could be split.

    Raises
    ------
    UserError
        It cannot be imported or called, is no module, does not take such samples, or does not fit this machine.
    """

    def __init__(self, name, input_shape, tokens=False):
        self.name, self.input_shape = name, input_shape
        self.input_type = torch.int64 if tokens else torch.float32
        self.uncut, self.templates = "", {}
        self.function = imported(name)
        with torch.device("meta"):
            self.module = _called(self.function, name)
        if not self.is_flat:
            _require_room(self.module, name)
            self.module = _called(self.function, name)
        with FakeTensorMode(allow_non_fake_inputs=True):
            blocks, samples = self.at(SAMPLES)(), self.samples(SAMPLES)
            _tried(blocks, samples, name)
            _tried_one_by_one(blocks, samples, name)

    @classmethod
    def wanted(cls, request):
        """Return the model that a `mpdemo.plan.command.Request` names."""
        return cls(request.model, tuple(map(int, request.input.split(","))), request.tokens)

    @property
    def is_flat(self) -> bool:
        """Whether it is a list of layers already, which needs no trace."""
        return bool(blocks_of(self.module))

    def at(self, size):
        """Return a function that builds the model for batches of `size`: a trace holds for one size alone."""
        if size not in self.templates:
            with unset_fake_temporarily(), quiet():
                blocks = each_with_parameters(self._blocks(size))  # of a traced model they are copies
                if not blocks:
                    raise UserError(f"--model {self.name} has no parameters to train; allowed: a model with some")
                self.templates[size] = Blocks(blocks).to("meta")
        return lambda: without_values(self.templates[size])

    def with_values(self, sizes, device) -> dict:
        """Return the model as the function makes it, to compute with it: size of a batch -> Blocks, for each size."""
        if self.is_flat:
            blocks = each_with_parameters(blocks_of(_called(self.function, self.name)))
            return dict.fromkeys(sizes, Blocks(blocks).to(device))
        with quiet():
            return {size: Blocks(each_with_parameters(self._blocks(size, device))) for size in sizes}

    def _blocks(self, size, device="cpu"):
        """Return the blocks; a trace holds fast on which device its tensors are made."""
        if self.is_flat:
            return blocks_of(self.module)
        samples = self.samples(size).to(device)
        blocks, self.uncut = traced(self.module.to(device), self.layers, samples)
        return blocks

    @cached_property
    def layers(self) -> list:
        """The names of its layers in the order of a forward pass, which is the same for every size."""
        samples = self.samples(SAMPLES)
        _tried(self.module, samples, self.name)
        return layers_in_order(self.module, samples)

    def samples(self, size) -> torch.Tensor:
        """Return a batch of zeros in the shape and the type of the samples."""
        return torch.zeros(size, *self.input_shape, dtype=self.input_type)


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
    """Return the function that ``package.module:function`` names."""
    module, _, function = name.partition(":")
    if not (module and function):
        raise UserError(f"--model {name!r} is not allowed; allowed: package.module:function, or a model of this course")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise UserError(f"--model {name} cannot be imported: {error}; is it in this folder, or installed?") from None
    finally:
        sys.path.remove(os.getcwd())


def _called(function, name) -> nn.Module:
    try:
        module = function()
    except Exception as error:  # the reader's own code
        raise UserError(
            f"--model {name}() ends with {error_line(error)}; allowed: a function without arguments"
        ) from None
    if not isinstance(module, nn.Module):
        raise UserError(f"--model {name}() returns {type(module).__name__}; allowed: a torch.nn.Module")
    return module


def _require_room(module, name):
    needed = 2 * sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))  # the model and its trace
    if needed > (free := psutil.virtual_memory().available):
        raise UserError(
            f"--model {name} must be built to be traced, which needs {needed / 2**30:.1f} GiB of {free / 2**30:.1f} "
            "free; write it as a torch.nn.Sequential, which is only counted, or plan on a larger machine"
        )


def _tried(module, sample, name):
    """Refuse a model that does not turn such samples into one tensor."""
    shape = tuple(sample.shape[1:])
    try:
        with torch.no_grad():
            output = module(sample)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise UserError(
            f"--model {name} asks for values (of samples, weights or random numbers), and a plan has none; allowed: a "
            "model of which only shapes decide what it computes"
        ) from None
    except Exception as error:  # the reader's own code
        raise UserError(f"--model {name} does not compute samples of shape {shape} ({error_line(error)})") from None
    if not isinstance(output, torch.Tensor):
        raise UserError(f"--model {name} returns {type(output).__name__}; allowed: a tensor (wrap it in a module)")


def _tried_one_by_one(blocks, x, name):
    """Refuse a model with a block that cannot be a stage, which has an input with a gradient of its own."""
    for number, label in enumerate(blocks.names):
        x = x.detach().requires_grad_(number > 0 and x.is_floating_point())
        try:
            x = blocks.stage(number, number + 1)(x)
        except Exception as error:  # the reader's own code
            raise UserError(
                f"--model {name} cannot be cut before {label} ({error_line(error)}); if this begins with an operation "
                "in place, such as nn.ReLU(inplace=True), leave inplace out"
            ) from None
