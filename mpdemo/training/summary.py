"""What is kept of a run when it ends: ``summary.json``."""

import os
import platform

import torch

from mpdemo.training.measure import peak_memory_of_all
from mpdemo.world.collectives import gather_objects


def summarise(run, seconds, stopped) -> dict:
    """Everything worth keeping of a `mpdemo.training.loop.Run`, in one dictionary; all ranks must call this.

    The steps and images are those of the whole training, the seconds those since this start of it.
    """
    settings, world = run.settings, run.world
    memory, hosts = peak_memory_of_all(world, run.rung.devices), gather_objects(platform.node())
    loss, accuracy = run.validation or (None, None)
    return {
        "settings": settings.as_dict(),
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu core",
            "backend": world.backend,
            "launcher": world.launcher,
            "hosts": hosts,
            "job": os.environ.get("SLURM_JOB_ID"),
        },
        "world_size": world.world_size,
        "stopped": stopped,
        "steps": run.step,
        "epochs": run.epoch,
        "seconds": round(seconds, 3),
        "images": run.step * settings.batch_size,
        "parameters": parameters(run.rung),
        "peak_memory_mib": memory,
        "loss": run.epoch_steps[-1][0] if run.epoch_steps else None,
        "validation_loss": loss,
        "validation_accuracy": accuracy,
    }


def parameters(rung) -> int:
    """Parameters of the whole model, each counted once; all ranks must call this."""
    parts = gather_objects({name: p.numel() for name, p in rung.named_parameters().items()})
    return sum({name: count for part in parts for name, count in part.items()}.values())
