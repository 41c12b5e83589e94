"""Let the processes of the tests start in half the time: what they never use is not loaded.

Every optimizer, every DDP and torchvision import `torch._dynamo`, PyTorch's compiler, 900 modules, for a few functions
that do nothing as long as nothing is compiled. Those few are here; whoever asks for another gets the compiler itself.
And nbformat builds a grammar of internationalised addresses, which no notebook has.

Python imports this file when it starts, since the tests have its folder on PYTHONPATH. At night they don't: there
everything is as it comes.
"""

import atexit
import gc
import importlib
import sys
import time
import types

COMPILER = "torch._dynamo"


class NotLoaded(types.ModuleType):
    """A module of the compiler; whoever asks for what it lacks gets the compiler."""

    def __getattr__(self, name):
        # `inspect` asks every module for its file; a package's path is asked for what lies in it
        if name.startswith("__") and (self.__name__, name) != (COMPILER, "__path__"):
            raise AttributeError(name)
        return getattr(loaded(self.__name__), name)


def loaded(name):
    """Return a module of the compiler itself."""
    for module in (compiler, utils):
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]
    return importlib.import_module(name)


def disable(function, *args, **kwargs):
    """Return the function, which is hidden from the compiler as soon as that is loaded."""

    def hidden(*inputs, **named):
        now = sys.modules[COMPILER]
        chosen = function if now is compiler else now.disable(function, *args, **kwargs)
        return chosen(*inputs, **named)

    return hidden


@atexit.register
def let_threads_end():
    """Leave gloo's threads time to give back their last tensor: one that needs Python when Python has ended, aborts."""
    if "torch" in sys.modules:
        time.sleep(0.1)


compiler, utils = NotLoaded(COMPILER), NotLoaded(f"{COMPILER}.utils")
compiler.disable, compiler.utils = disable, utils
compiler.graph_break = lambda: None
compiler.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
utils.get_optimize_ddp_mode = lambda: "ddp_optimizer"
utils.is_compile_supported = lambda device: loaded(utils.__name__).is_compile_supported(device)
sys.modules |= {module.__name__: module for module in (compiler, utils)}
sys.modules["rfc3987_syntax"] = None  # jsonschema does without
gc.set_threshold(100_000, 50, 100)  # an import makes many objects and no garbage
