"""Build what a training needs from its settings: data set, rung, optimizer, learning-rate scheduler."""

import math

import torch

from mpdemo import data, models, parallel
from mpdemo.errors import UserError


def build(settings, world):
    """Return data set, rung and optimizer for checked settings."""
    torch.manual_seed(settings.seed)
    dataset = data.load(settings.dataset, settings.data, settings.image_size, settings.seed)
    model = models.build(
        settings.model,
        classes=dataset.classes,
        channels=dataset.channels,
        image_size=settings.image_size,
        norm=settings.norm,
        seed=settings.seed,
    )
    rung = parallel.make(model, world, settings)
    return dataset, rung, make_optimizer(rung.named_parameters().values(), settings)


def make_optimizer(parameters, settings):
    """Return the optimizer of checked settings for these parameters, with PyTorch's own defaults on every rung."""
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=settings.lr)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=0.9)


def make_scheduler(optimizer, settings, length):
    """Return what sets the learning rate of every step: a warm-up, then constant or along a half cosine.

    The rate depends on the step's number only, so a resumed run has that of the uninterrupted one.

    Parameters
    ----------
    length : int
        Steps of the whole training, also where it is stopped earlier: the cosine ends there.

    Raises
    ------
    UserError
        The warm-up leaves the cosine no step.
    """
    warmup = settings.warmup_steps
    if settings.lr_schedule == "cosine" and warmup >= length:
        raise UserError(f"--warmup-steps {warmup} leaves no step of {length} to the cosine; allowed: 0 to {length - 1}")

    def factor(step):  # counted from 0
        if step < warmup:
            return (step + 1) / warmup
        if settings.lr_schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (length - warmup)))
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
