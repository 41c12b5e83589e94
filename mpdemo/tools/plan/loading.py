"""A function, ``package.module:function`` or ``./file.py:function``: import it, and call it for a module.

The module's numbers may not fit, and are not wanted: its large tensors lie on meta, which takes no memory.
"""

import importlib.util
import io
import logging
import os
import sys
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mpdemo import models
from mpdemo.errors import UserError, error_line
from mpdemo.models.private_torch import (
    TorchDispatchMode,
    device_constructors,
    tree_leaves,
    tree_map_only,
)

LARGEST_READ = 1024  # numbers; a shorter tensor keeps its own, as a module may read it
LARGEST_REAL = 2**30  # bytes of a module that is built with all its numbers
RANGES = torch.arange, torch.linspace, torch.logspace, torch.tensor, torch.as_tensor, torch.asarray


def imported(name):
    """Return the function that ``package.module:function`` or ``./file.py:function`` names."""
    module, _, function = name.rpartition(":")
    if not (module and function):
        raise UserError(
            f"--model {name!r} is not allowed; allowed: package.module:function, or a model of this course"
        )
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


def of_course(name, **images):
    """Return a model of the course as a list of its blocks: a list in a list, so that each is one layer for FSDP."""
    return nn.Sequential(nn.Sequential(*models.build(name, **images).blocks()))


def called(function, name) -> tuple:
    """Return the module that a function makes, and the inputs; None where it gives no inputs."""
    with quiet():
        made = build(function, name)
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    if not isinstance(module, nn.Module):
        raise UserError(f"--model {name}() returns {type(module).__name__}; allowed: a torch.nn.Module")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UserError(f"--model {name}() returns a scripted module, whose code cannot be followed; allowed: the "
                        "module before torch.jit.script")  # fmt: skip
    return module, inputs


def build(function, name):
    """Return what a reader's function returns, with as few numbers as it can be built with."""
    for place in (WithoutNumbers(), torch.device("meta"), WithNumbers()):
        try:
            with place:
                return function()
        except (Exception, SystemExit) as error:  # the reader's own code, perhaps as it asks for a number
            last = error
    if isinstance(last, MemoryError) or "can't allocate memory" in str(last):
        raise UserError(f"--model {name}() asks for numbers while it is built, and is larger than "
                        f"{LARGEST_REAL >> 30} GiB with all of them, which a plan does not take; allowed: a function "
                        'that also runs under torch.device("meta")')  # fmt: skip
    raise UserError(f"--model {name}() ends with {error_line(last)}; allowed: a function without arguments")


def without_device(args, kwargs):
    """Do what ``.cuda`` or ``.to`` does to a tensor, but for the device."""
    given = [getattr(value, "dtype", value) for value in (*args[1:], *kwargs.values())]
    kinds = [value for value in given if isinstance(value, torch.dtype)]
    form = {name: kwargs[name] for name in ("memory_format",) if kwargs.get(name)}
    return torch.Tensor.to(args[0], *(kinds or [args[0].dtype]), **form)


class WithoutNumbers(TorchFunctionMode):
    """Make tensors on meta, but short ones and ranges with their numbers; GPUs are left alone.

    Where both meet in an operation, the result has no numbers.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.cuda, torch.Tensor.to):  # type and layout change, not the device
            return without_device(args, kwargs)
        if function in device_constructors():
            on_meta = function(*args, **kwargs | {"device": "meta"})
            read = function in RANGES or 0 < on_meta.numel() <= LARGEST_READ
            # what is lazy has no elements, and then asks for meta
            if not read or str(kwargs.get("device")) == "meta":
                return on_meta
            return function(*args, **kwargs | {"device": "cpu"})
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if len({tensor.is_meta for tensor in tensors}) == 2:
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return function(*args, **kwargs)


class WithNumbers(TorchDispatchMode):
    """Make tensors as they are, up to `LARGEST_REAL` bytes more than the process has; then end with a `MemoryError`."""

    def __init__(self):
        super().__init__()
        self.process = psutil.Process()
        self.most = self.process.memory_info().rss + LARGEST_REAL

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, new = dict(kwargs or {}), 0
        if "device" in kwargs and not any(
            isinstance(value, torch.Tensor) for value in tree_leaves((args, kwargs))
        ):
            # before it takes the memory
            new = function(*args, **kwargs | {"device": torch.device("meta")}).nbytes
        if self.process.memory_info().rss + new > self.most:
            raise MemoryError
        return function(*args, **kwargs)


@contextmanager
def quiet():
    """Keep what a reader's code logs, warns of and prints from the terminal, and keep it from ending the process."""
    process, leave = os.getpid(), os._exit
    # Without a word, and with the status that it likes. A child that it has forked may.
    os._exit = lambda status: sys.exit(status) if os.getpid() == process else leave(status)
    logging.disable(logging.CRITICAL)
    with (
        warnings.catch_warnings(action="ignore"),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            os._exit = leave
