"""Every setting of a training run, said and checked once (train.py); the models' blocks; the pipelines' schedules."""

from mpdemo.settings.train import (
    CUT_RUNGS,
    MODELS,
    NORMS,
    RUNG_FORMS,
    RUNGS,
    Count,
    Pixels,
    Settings,
    checked,
    equal_cut,
    is_per_device,
    records_timeline,
)

__all__ = ["CUT_RUNGS", "MODELS", "NORMS", "RUNGS", "RUNG_FORMS", "Count", "Pixels", "Settings", "checked"]
__all__ += ["equal_cut", "is_per_device", "records_timeline"]
