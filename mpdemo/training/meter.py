"""The clock and the memory of a run: what it costs, without making it wait; and its summary.

Reading a loss on the host (``loss.item()``) waits for the device. So losses are kept where they are computed, and
fetched together every few steps. Taught in notebooks/01_single_device.ipynb.
"""

import os
import platform
import resource
import sys
import time

import torch

from mpdemo.world.collectives import gather_objects, sum_over_ranks


def peak_memory_mib(devices) -> list[float]:
    """Peak memory so far of each device that this process drives, in MiB (2**20 bytes).

    On a GPU what PyTorch allocated there; on a CPU one number for all its cores: the largest resident size of the whole
    process, libraries included.
    """
    if devices[0].type == "cuda":
        return [torch.cuda.max_memory_allocated(device) / 2**20 for device in devices]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [peak / 2**20 if sys.platform == "darwin" else peak / 2**10]  # macOS counts bytes, Linux KiB


def peak_memory_of_all(run) -> list[float]:
    """Peak memory of the devices of all processes, in order of rank; every rank must call this."""
    own = torch.tensor(peak_memory_mib(run.devices), dtype=torch.double, device=run.device)
    table = own.new_zeros(run.world, len(own))
    table[run.rank] = own
    return [round(mib, 1) for mib in sum_over_ranks(table).flatten().tolist()]


class Steps:
    """Losses and correct predictions of the steps since the last flush, still on the device."""

    def __init__(self, device, replicas):
        self.device, self.replicas = device, replicas
        self.rows, self.parts = [], []
        self.clock = time.perf_counter()

    def add(self, loss, outputs, labels):
        """Keep the result of a part of a step; does not wait for it."""
        correct = (outputs.detach().argmax(1) == labels.to(outputs.device)).sum()
        self.parts.append(torch.stack([loss.detach().double(), correct.double()]))

    def end_step(self):
        """Add up the parts of a step; a process without the outputs has none."""
        nothing = torch.zeros(2, dtype=torch.double, device=self.device)
        self.rows.append(sum(self.parts, nothing.to(self.parts[0].device) if self.parts else nothing))
        self.parts = []

    def flush(self):
        """Fetch all steps kept so far, over all ranks: this waits for the device.

        Returns
        -------
        rows : list of (loss, correct)
            One pair per step: mean loss over the global batch, correct predictions in it.
        seconds : float
            Time per step, averaged over these steps.
        """
        if not self.rows:
            return [], 0.0
        table = sum_over_ranks(torch.stack(self.rows).to(self.device))
        table[:, 0] /= self.replicas  # each replica holds the mean over its own share
        rows = table.tolist()  # the one place that waits
        now = time.perf_counter()
        seconds = (now - self.clock) / len(rows)
        self.clock, self.rows = now, []
        return rows, seconds

    def restart_clock(self):
        """Leave out what happened since the last flush (a checkpoint)."""
        self.clock = time.perf_counter()


def summarise(run, model, seconds, stopped) -> dict:
    """Everything worth keeping of a `mpdemo.run.Run`, in one dictionary; all ranks must call this.

    The steps and images are those of the whole training, the seconds those since this start of it.
    """
    memory, hosts = peak_memory_of_all(run), gather_objects(platform.node())
    loss, accuracy = run.validation or (None, None)
    return {
        "settings": run.s.as_dict(),
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu core",
            "backend": run.place.backend,
            "launcher": run.place.launcher,
            "hosts": hosts,
            "job": os.environ.get("SLURM_JOB_ID"),
        },
        "world_size": run.world,
        "stopped": stopped,
        "steps": run.steps_done,
        "epochs": run.epoch,
        "seconds": round(seconds, 3),
        "images": run.steps_done * run.s.batch_size,
        "parameters": count_parameters(model),
        "peak_memory_mib": memory,
        "loss": run.epoch_steps[-1][0] if run.epoch_steps else None,
        "validation_loss": loss,
        "validation_accuracy": accuracy,
    }


def count_parameters(model) -> int:
    """Parameters of the whole model, each counted once; all ranks must call this with what they hold."""
    parts = gather_objects({name: p.numel() for name, p in model.named_parameters()})
    return sum({name: count for part in parts for name, count in part.items()}.values())
