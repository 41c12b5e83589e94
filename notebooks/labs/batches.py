"""Larger batches at equal epochs: the same learning rate, a scaled one, and a scaled one with warm-up.

    python -m mpdemo.labs.batches runs/batches

All runs follow each other in this process; ``summary.json`` has one row per batch and rule, the medians of three seeds.
Taught in notebooks/02_data_parallel.ipynb.
"""

import statistics
import sys

import torch
from torch.nn.functional import cross_entropy

from mpdemo import data, models
from mpdemo.compare import write_result
from mpdemo.world.launch import end

TOY = {"model": "toy", "batch_size": 32, "lr": 0.005, "epochs": 8}  # a careful rate: there is room above it
CONVNET = {"model": "convnet", "image_size": 14, "batch_size": 32, "lr": 0.02, "epochs": 4}  # as large as it can be
FACTORS = (1, 2, 4, 8, 16)  # the global batch over that of one device; with 16 an epoch has 3 steps
RULES = ("same rate", "rate times factor", "with warm-up")
SEEDS = (0, 1, 2)
IMAGES = 1536  # to train on


def settings_of(base, factor, rule) -> dict:
    """Return the settings of a run whose batch is `factor` times as large, by one of the `RULES`.

    The linear rule is of Goyal et al. 2017, https://arxiv.org/abs/1706.02677: `factor` times the batch, `factor` times
    the learning rate. The warm-up takes the first quarter of the steps.
    """
    batch = factor * base["batch_size"]
    steps = base["epochs"] * (IMAGES // batch)
    rate = base["lr"] * (1 if rule == "same rate" else factor)
    warmup = steps // 4 if rule == "with warm-up" else 0
    return base | {"batch_size": batch, "lr": rate, "warmup_steps": warmup}


def train(world, settings, seed) -> tuple[float, float]:
    """Train once; return loss and accuracy of the validation images at the end."""
    size, lr, warmup = settings.get("image_size", 28), settings["lr"], settings["warmup_steps"]
    dataset = data.load("digits", None, size, seed)
    model = models.build(settings["model"], image_size=size, seed=seed).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loaders, step = data.Loaders(dataset, settings["batch_size"], seed=seed), 0
    for epoch in range(settings["epochs"]):
        loaders.start_epoch(epoch)
        for images, labels in loaders.train:
            step += 1
            optimizer.param_groups[0]["lr"] = lr * min(1, step / max(1, warmup))
            optimizer.zero_grad()
            cross_entropy(model(images.to(world.device)), labels.to(world.device)).backward()
            optimizer.step()
    model.eval()
    images, labels = (tensor.to(world.device) for tensor in dataset.validation.tensors)
    with torch.no_grad():
        outputs = model(images)
    return cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).double().mean().item()


def median_row(world, base, factor, rule) -> dict:
    """Train with every seed; return the settings, the losses, and the medians over the seeds."""
    settings = settings_of(base, factor, rule)
    losses, accuracies = zip(*(train(world, settings, seed) for seed in SEEDS), strict=True)
    medians = {"loss": statistics.median(losses), "accuracy": statistics.median(accuracies), "losses": losses}
    return {"factor": factor, "rule": rule} | settings | medians


def main(out):
    """Train the toy with every batch by every rule, and the ConvNet with and without warm-up; write the rows."""
    variants = [(TOY, factor, rule) for factor in FACTORS for rule in (RULES if factor > 1 else RULES[:1])]
    variants += [(CONVNET, 8, rule) for rule in RULES[1:]]
    write_result(out, lambda world: {"rows": [median_row(world, *variant) for variant in variants]})


if __name__ == "__main__":
    end(main(sys.argv[1]))
