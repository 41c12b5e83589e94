"""The clock and the memory of a run: what it costs, without making it wait.

Reading a loss on the host (``loss.item()``) waits for the device. So losses are kept where they are computed and
fetched together every few steps. Taught in notebooks/01_single_device.ipynb.
"""

import resource
import sys
import time

import torch

from mpdemo.world.collectives import sum_over_ranks


def peak_memory_mib(devices) -> list[float]:
    """Peak memory so far of each device that this process drives, in MiB (2**20 bytes).

    On a GPU what PyTorch allocated there; on a CPU one number for all its cores: the largest resident size of the whole
    process, libraries included.
    """
    if devices[0].type == "cuda":
        return [torch.cuda.max_memory_allocated(device) / 2**20 for device in devices]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [peak / 2**20 if sys.platform == "darwin" else peak / 2**10]  # macOS counts bytes, Linux KiB


def peak_memory_of_all(world, devices) -> list[float]:
    """Peak memory of the devices of all processes, in order of rank; every rank must call this."""
    own = torch.tensor(peak_memory_mib(devices), dtype=torch.double, device=world.device)
    table = own.new_zeros(world.world_size, len(own))
    table[world.rank] = own
    return [round(mib, 1) for mib in sum_over_ranks(table).flatten().tolist()]


def relative_difference(values, reference) -> float:
    """How far gradients (or weights) are from those of the reference: the worst parameter's relative error.

    Parameters
    ----------
    values, reference : dict of str to torch.Tensor
        By parameter name; only the names in `values` are compared (a rank of a cut model holds some of them).

    Returns
    -------
    float
        max over parameters of ``|value - reference| / |reference|`` in the 2-norm. A parameter whose gradient is zero
        but for rounding (a bias before a batch norm) is measured against 1 % of the whole gradient's norm instead.
    """
    norms = {name: torch.linalg.vector_norm(tensor.double()).item() for name, tensor in reference.items()}
    floor = 0.01 * sum(n**2 for n in norms.values()) ** 0.5
    differences = [
        torch.linalg.vector_norm(value.double().cpu() - reference[name].double().cpu()).item() / max(norms[name], floor)
        for name, value in values.items()
    ]
    return max(differences, default=0.0)


class Steps:
    """Losses and right answers of the steps since the last flush, still on the device."""

    def __init__(self, replicas):
        self.replicas, self.rows = replicas, []
        self.clock = time.perf_counter()

    def add(self, loss, correct):
        """Keep one step's result; does not wait for it."""
        self.rows.append(torch.stack([loss.double(), correct.double()]))

    def flush(self):
        """Fetch all steps kept so far, over all ranks: this waits for the device.

        Returns
        -------
        rows : list of (loss, correct)
            One pair per step: mean loss over the global batch, right answers in it.
        seconds : float
            Time per step, averaged over these steps.
        """
        if not self.rows:
            return [], 0.0
        table = sum_over_ranks(torch.stack(self.rows))
        table[:, 0] /= self.replicas  # each replica holds the mean over its own share
        rows = table.tolist()  # the one place that waits
        now = time.perf_counter()
        seconds = (now - self.clock) / len(rows)
        self.clock, self.rows = now, []
        return rows, seconds

    def restart_clock(self):
        """Leave out what happened since the last flush (a checkpoint)."""
        self.clock = time.perf_counter()
