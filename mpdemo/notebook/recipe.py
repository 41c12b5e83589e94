"""The recipe of the course model: one training run, the same for every strategy, so that the runs can be compared.

A vision transformer of eight equal blocks learns the digits, in the notebooks and in ``mpdemo demo``.
"""

from mpdemo.settings import RUNG_FORMS
from mpdemo.settings.cuts import DEPTH
from mpdemo.settings.rules import records_timeline

RECIPE = {
    "model": "transformer",
    "dataset": "digits",
    "batch_size": 64,
    "epochs": 2,
    "optimizer": "adamw",
    "lr": 1e-3,
    "warmup_steps": 10,
    "lr_schedule": "cosine",
}
PIPELINE = {"schedule": "Interleaved1F1B", "microbatches": 4}  # two stages per device: the shorter bubble


def recipe(rung, **changes) -> dict:
    """Return the settings of the course model's training run with a strategy, in the folder ``runs/train_RUNG``.

    The changes are added or replace some; None leaves a setting to its default.
    """
    form = changes.get("form") or RUNG_FORMS.get(rung, (None,))[0]
    settings = {"rung": rung, **RECIPE, "out": f"runs/train_{rung}"}
    if records_timeline(rung, form):
        settings["timeline"] = True
    if rung in ("pipeline", "hybrid"):
        if form == "per-device":
            settings.update(PIPELINE, cut=equal_cut(4))
        else:
            settings["microbatches"] = 4
    return settings | changes


def equal_cut(stages) -> str:
    """Cut the transformer's eight blocks into equal stages (2, 4 or 8), as ``--cut`` takes it."""
    return ",".join(f"block.{DEPTH * number // stages - 1}" for number in range(1, stages))
