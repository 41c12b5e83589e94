"""The clock and the memory of a run: what it costs, without making it wait; and its summary.

Reading a loss on the host (``loss.item()``) waits for the device. So losses are kept where they are computed, and
fetched together every few steps. Taught in notebooks/01_single_device.ipynb.
"""

import os
import platform
import resource
import time
from collections import ChainMap

import torch

from mpdemo.world.collectives import gather_objects, sum_over_ranks


def peak_memory_mib(devices) -> list[float]:
    """Return the peak memory so far, in MiB, of each GPU that this process drives; on a CPU, of the process."""
    if devices[0].type == "cuda":
        return [torch.cuda.max_memory_allocated(device) / 2**20 for device in devices]
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10]  # Linux counts KiB


def of_all(run, *readings) -> list[list]:
    """Return each reading, a list, joined over all processes in order of rank; every rank must call this."""
    own = torch.tensor([number for reading in readings for number in reading], dtype=torch.double, device=run.device)
    table = own.new_zeros(run.world, len(own))
    table[run.rank] = own
    return [part.flatten().tolist() for part in sum_over_ranks(table).split([len(row) for row in readings], dim=1)]


class Steps:
    """Losses and correct predictions of the steps since the last flush, still on the device."""

    def __init__(self, device, replicas):
        self.device, self.replicas, self.rows, self.step = device, replicas, [], 0
        self.restart_clock()

    def add(self, loss, outputs, labels):
        """Add the result of a part of a step; does not wait for it."""
        correct = (outputs.detach().argmax(1) == labels.to(outputs.device)).sum()
        self.step = self.step + torch.stack([loss.detach().double(), correct.double()])

    def end_step(self):
        """Keep the sum of a step's parts; a process without the outputs has none."""
        if isinstance(self.step, int):  # no part was added
            self.step = torch.zeros(2, dtype=torch.double, device=self.device)
        self.rows.append(self.step)
        self.step = 0

    def flush(self):
        """Fetch all steps kept so far, over all ranks: this waits for the device.

        Returns the mean loss over the global batch and the correct predictions in it, a pair per step, and the seconds
        per step, averaged over these.
        """
        if not self.rows:
            return [], 0.0
        table = sum_over_ranks(torch.stack(self.rows).to(self.device))
        table[:, 0] /= self.replicas  # each replica holds the mean over its own share
        rows, before = table.tolist(), self.clock  # the one place that waits
        self.rows = []
        self.restart_clock()
        return rows, (self.clock - before) / len(rows)

    def restart_clock(self):
        """Leave out what happened since the last flush (a checkpoint)."""
        self.clock = time.perf_counter()


def summarise(run, model, seconds, stopped) -> dict:
    """Everything worth keeping of a `mpdemo.run.Run`, in one dictionary; all ranks must call this.

    Steps and images count the whole training, seconds only the time since this run was started.
    """
    own = platform.node(), {name: parameter.numel() for name, parameter in model.named_parameters()}
    (memory,), (hosts, parts) = of_all(run, peak_memory_mib(run.devices)), zip(*gather_objects(own), strict=True)
    loss, accuracy = run.validation or (None, None)
    return {
        "settings": run.s.as_dict(),
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu core",
            "backend": run.place.backend,
            "launcher": run.place.launcher,
            "hosts": list(hosts),
            "job": os.environ.get("SLURM_JOB_ID"),
        },
        "world_size": run.world,
        "stopped": stopped,
        "steps": run.steps_done,
        "epochs": run.epoch,
        "seconds": round(seconds, 3),
        "images": run.steps_done * run.s.batch_size,
        "parameters": sum(dict(ChainMap(*parts)).values()),  # each counted once, whoever holds it
        "peak_memory_mib": [round(mib, 1) for mib in memory],
        "busy": run.busy.summary() if run.rank == 0 else None,
        "loss": run.epoch_steps[-1][0] if run.epoch_steps else None,
        "validation_loss": loss,
        "validation_accuracy": accuracy,
    }
