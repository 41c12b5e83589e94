"""Let the processes of the tests start in half the time: what they never use is not loaded.

Every optimizer and every DDP imports `torch._dynamo`, 900 modules, for a few functions that do nothing as long as
nothing is compiled. Those few are here; whoever asks for another gets the compiler itself. And nbformat builds a
grammar of internationalised addresses, which no notebook has. Python imports this file when it starts, since the
tests have its folder on PYTHONPATH. At night they don't: there everything is as it comes.
"""

import gc
import importlib
import sys
import types

NAME = "torch._dynamo"


class NothingCompiled(types.ModuleType):
    """What `torch._dynamo` says in a process that has compiled nothing."""

    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
    utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")

    def graph_break(self):
        """Break no graph: there is none."""

    def disable(self, function, *args, **kwargs):
        """Return the function, which is hidden from the compiler as soon as that is loaded."""

        def hidden(*inputs, **named):
            compiler = sys.modules[NAME]
            chosen = function if compiler is self else compiler.disable(function, *args, **kwargs)
            return chosen(*inputs, **named)

        return hidden

    def __getattr__(self, name):
        if name.startswith("__") and name != "__path__":  # `inspect` asks every module for its file
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


sys.modules[NAME] = NothingCompiled(NAME)
sys.modules["rfc3987_syntax"] = None  # jsonschema does without
gc.set_threshold(100_000, 50, 100)  # an import makes many objects and no garbage
