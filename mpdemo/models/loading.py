"""A reader's function, ``package.module:function`` or ``./file.py:function``: import it, and call it for a module."""

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

from mpdemo.errors import UserError, error_line
from mpdemo.models.building import build
from mpdemo.models.private_torch import OptimizedModule


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
    with quiet():
        made = build(function, name)
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
