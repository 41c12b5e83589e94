"""The ladder: one file per rung, all of one shape. Read two side by side: what differs is the lesson.

Every class is built as ``Rung(model, world, settings)`` and offers the same few things (see rung.py); the training
loop in mpdemo/training/loop.py does not know which one it drives.
"""

import importlib
from dataclasses import replace

CLASSES = {
    ("single", "one-process"): ("single", "Single"),
    ("data_parallel", "one-process"): ("data_parallel", "DataParallel"),
    ("ddp", "per-device"): ("ddp", "DDP"),
    ("model_parallel", "one-process"): ("model_parallel", "OneProcess"),
    ("model_parallel", "per-device"): ("model_parallel", "PerDevice"),
    ("pipeline", "one-process"): ("pipeline", "OneProcess"),
    ("pipeline", "per-device"): ("pipeline", "PerDevice"),
    ("hybrid", "one-process"): ("hybrid", "OneProcess"),
    ("hybrid", "per-device"): ("hybrid", "PerDevice"),
    ("fsdp", "per-device"): ("fsdp", "FSDP"),
    ("tensor", "per-device"): ("tensor", "Tensor"),
}


def make(model, world, settings):
    """Return the rung that `settings` (checked) asks for, with `model` placed on its devices."""
    savings = importlib.import_module(f"{__name__}.savings")
    module, name = CLASSES[settings.rung, settings.form]
    rung_class = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    savings.prepare(model, settings, world.device)
    part = replace(settings, batch_size=settings.batch_size // settings.accumulate)  # what a step of it computes
    return savings.finish(rung_class(model, world, part), settings)
