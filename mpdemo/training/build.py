"""Build what a training needs from its settings: data set, rung, optimizer, learning-rate scheduler."""

import torch

from mpdemo import data, models, parallel
from mpdemo.errors import UserError


def build(settings, world):
    """Return data set, rung, optimizer and learning-rate scheduler for checked settings."""
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
    model.precision = precision_of(settings, world)
    rung = parallel.make(model, world, settings)
    optimizer = torch.optim.SGD(rung.named_parameters().values(), lr=settings.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.1)  # a tenth every 20 epochs
    return dataset, rung, optimizer, scheduler


def precision_of(settings, world):
    """Return the type that autocast computes in, None for plain float32.

    Raises
    ------
    UserError
        fp16 on a CPU (100 times slower than fp32 there), or in a cut model, whose stages would have to agree on
        when a scaled loss overflows.
    """
    if settings.precision == "fp16":
        if world.device.type == "cpu":
            raise UserError("--precision fp16 is many times slower than fp32 on a CPU; allowed there: fp32, bf16")
        if settings.rung in ("model_parallel", "pipeline"):
            raise UserError(f"--precision fp16 needs one loss scale, rung {settings.rung} has none; use bf16")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]
