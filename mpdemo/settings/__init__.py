"""Every setting of a training run, said once (train.py) and checked once, also which ones go together (rules.py).

Both need to know the blocks of the models (cuts.py) and the schedules of pipelines (schedules.py). None needs PyTorch.
"""

from mpdemo.settings.train import MODELS, NORMS, RUNG_FORMS, RUNGS, Count, Pixels, Settings, checked, equal_cut, recipe

__all__ = ["MODELS", "NORMS", "RUNGS", "RUNG_FORMS", "Count", "Pixels", "Settings", "checked", "equal_cut", "recipe"]
