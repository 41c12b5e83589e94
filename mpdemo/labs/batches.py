"""Larger batches at equal epochs: the same learning rate, a scaled one, and a scaled one with warm-up.

    python -m mpdemo.labs.batches runs/batches

All trainings run one after the other in this process, each in a folder of its own below the given one, which gets a
``summary.json`` with one row per batch and rule. Taught in notebooks/02_data_parallel.ipynb.
"""

import statistics
import sys
from pathlib import Path

from mpdemo.labs.harness import write_result
from mpdemo.settings import Settings, checked
from mpdemo.training.loop import train
from mpdemo.log import rows_in
from mpdemo.world.launch import end

TOY = {"model": "toy", "batch_size": 32, "lr": 0.005, "epochs": 8}  # a careful rate: there is room above it
CONVNET = {"model": "convnet", "image_size": 14, "batch_size": 32, "lr": 0.02, "epochs": 4}  # as large as it can be
FACTORS = (1, 2, 4, 8, 16)  # the global batch over that of one device; with 16 an epoch has 3 steps
RULES = ("same rate", "rate times factor", "with warm-up")
SEEDS = (0, 1, 2)
IMAGES = 1536  # to train on


def settings_of(base, factor, rule) -> dict:
    """Return the settings of a training whose batch is `factor` times as large, by one of the `RULES`.

    The linear rule is of Goyal et al. 2017, https://arxiv.org/abs/1706.02677: `factor` times the batch, `factor` times
    the learning rate. The warm-up takes the first quarter of the steps.
    """
    batch = factor * base["batch_size"]
    steps = base["epochs"] * (IMAGES // batch)
    rate = base["lr"] * (1 if rule == "same rate" else factor)
    warmup = steps // 4 if rule == "with warm-up" else 0
    return base | {"batch_size": batch, "lr": rate, "warmup_steps": warmup}


def median_row(world, folder, base, factor, rule) -> dict:
    """Train with every seed; return the settings, the losses, and the medians over the seeds."""
    settings = settings_of(base, factor, rule)
    folders = [folder / f"{base['model']} {rule} {factor} {seed}" for seed in SEEDS]
    ends = [last_epoch(world, settings | {"seed": seed}, out) for seed, out in zip(SEEDS, folders, strict=True)]
    medians = {key: statistics.median(end[key] for end in ends) for key in ("steps", "loss", "accuracy")}
    return {"factor": factor, "rule": rule} | settings | medians | {"losses": [end["loss"] for end in ends]}


def last_epoch(world, settings, out) -> dict:
    """Train once; return the number of steps, and loss and accuracy of the validation images at the end."""
    train(checked(Settings(rung="single", **settings, out=str(out), log_every=1000)), world)
    row = [row for row in rows_in(out) if row["event"] == "epoch"][-1]
    return {"steps": row["step"], "loss": row["validation_loss"], "accuracy": row["validation_accuracy"]}


def main(out):
    """Train the toy with every batch by every rule, and the ConvNet with and without warm-up; write the rows."""
    variants = [(TOY, factor, rule) for factor in FACTORS for rule in (RULES if factor > 1 else RULES[:1])]
    variants += [(CONVNET, 8, rule) for rule in RULES[1:]]
    write_result(out, lambda world: {"rows": [median_row(world, Path(out), *variant) for variant in variants]})


if __name__ == "__main__":
    end(main(sys.argv[1]))
