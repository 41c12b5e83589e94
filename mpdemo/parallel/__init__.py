"""The ladder: one file per rung, all of one shape. Read two side by side: what differs is the lesson.

Every class is built as ``Rung(model, world, settings)`` and offers the same few things (see rung.py); the training
loop in mpdemo/training/loop.py does not know which one it drives.
"""

import importlib

CLASSES = {
    ("single", "one-process"): ("single", "Single"),
    ("data_parallel", "one-process"): ("data_parallel", "DataParallel"),
    ("ddp", "per-device"): ("ddp", "DDP"),
    ("model_parallel", "one-process"): ("model_parallel", "OneProcess"),
    ("model_parallel", "per-device"): ("model_parallel", "PerDevice"),
    ("pipeline", "one-process"): ("pipeline", "OneProcess"),
    ("pipeline", "per-device"): ("pipeline", "PerDevice"),
}


def make(model, world, settings):
    """Return the rung that `settings` (checked) asks for, with `model` placed on its devices."""
    module, name = CLASSES[settings.rung, settings.form]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)(model, world, settings)
