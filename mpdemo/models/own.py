"""A reader's own model, any module: ``package.module:function`` or ``./file.py:function``, which returns it.

It is planned as it is, on one device, with DDP and with FSDP (`WrappedModule`), and not split. Used by ``python -m
mpdemo plan --model``; taught in notebooks/11_which_one.ipynb.
"""

import importlib.util
import io
import logging
import os
import sys
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from mpdemo.errors import UserError, error_line
from mpdemo.models.wrapped import WrappedModule, layers_entered, shared, without_values

SAMPLES = 2  # of the batch on which a model is tried


class OwnModel:
    """A model that can be built for batches of any size, its weights without values.

    The function `name` takes no arguments and returns a module, or a module and its inputs. Without inputs the samples
    have the `input_shape`, (C, S, S) of an image or (T,) of a row of tokens, which are whole numbers. `notes` are what
    the reader should know of the model.
    """

    def __init__(self, name, input_shape=None, tokens=False):
        self.name, self.given, self.notes = name, (input_shape, tokens), []
        self.function = imported(name)
        try:
            with torch.device("meta"):  # takes no memory, and no time
                self.template = self._made()
            self._try()
        except Exception:  # a model that asks for values while it is built
            self.template = self._made()
            self._try()

    def _made(self) -> WrappedModule:
        """Call the function; return what it makes, with all parameters, but perhaps without their values."""
        module, inputs = called(self.function, self.name)
        shape, tokens = self.given
        if inputs is None and shape is None:
            raise UserError("a model of your own needs --input, the shape of a sample, such as 3,224,224")
        if inputs is None:
            kinds = [p.dtype for p in module.parameters() if p.is_floating_point()]
            inputs = torch.zeros(SAMPLES, *shape, dtype=torch.int64 if tokens else [*kinds, torch.float32][0])
        self.input_shape, self.input_type = next(
            (leaf.shape[1:], leaf.dtype) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)
        )
        wrapped = WrappedModule(module, inputs)
        if lazy := [p for p in module.parameters() if is_lazy(p)]:
            with torch.no_grad(), quiet():
                wrapped(self.samples().to(lazy[0].device))
        return wrapped

    def _try(self):
        """Compute a batch forward and backward on fake tensors; learn the layers, and what no gradient reaches."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"), quiet():
            wrapped, x = self.empty_copy(), self.samples()
            try:
                outputs, layers = layers_entered(wrapped.module, lambda: wrapped(x))
                trained = [(name, p) for name, p in wrapped.module.named_parameters() if p.requires_grad]
                if trained:
                    outputs.sum().backward()
            except (DataDependentOutputException, DynamicOutputShapeException):
                raise UserError(
                    f"--model {self.name} asks for values (of samples, weights or random numbers) while it computes, "
                    "and a plan has none; allowed: a model of which only shapes decide what it computes"
                ) from None
            except Exception as error:  # the reader's own code
                shape = tuple(self.input_shape)
                raise UserError(
                    f"--model {self.name} does not compute samples of shape {shape} ({error_line(error)})"
                ) from None
        if not trained:
            raise UserError(f"--model {self.name} has no parameters to train; allowed: a model with some")
        ties = shared(wrapped.module)
        self.notes = [f"{' and '.join(names)} are one parameter, which is counted once" for names in ties]
        if unused := [name for name, p in trained if p.grad is None]:
            some = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
            self.notes.append(
                f"no gradient reaches {some}; DDP stops at its second step without find_unused_parameters"
            )
        tied = [name for names in ties for name in names]  # FSDP cannot divide them with one layer alone
        self.template.layers = [layer for layer in layers if not any(name.startswith(f"{layer}.") for name in tied)]

    def empty_copy(self) -> WrappedModule:
        """Return a copy of the model without values, on fake tensors within a ``FakeTensorMode``."""
        return without_values(self.template)

    def samples(self) -> torch.Tensor:
        """Return a small batch of zeros in the shape and the type of the samples."""
        return torch.zeros(SAMPLES, *self.input_shape, dtype=self.input_type, device="cpu")


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


@contextmanager
def quiet():
    """Keep what a reader's code logs, warns of and prints from the terminal."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
