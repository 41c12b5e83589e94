"""The clock and the memory of a run: what it costs, without making it wait.

Reading a loss on the host (``loss.item()``) waits for the device. So losses are kept where they are computed and
fetched together every few steps. Taught in notebooks/01_single_device.ipynb.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mpdemo.errors import UserError


def peak_memory_mib(device) -> float:
    """Peak memory of this process's device in MiB (2**20 bytes).

    On a GPU what PyTorch allocated there; on a CPU the largest resident size of the whole process, libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # macOS counts bytes, Linux KiB


def sum_over_ranks(tensor):
    """Add up a tensor over all processes, in place; every process gets the sum. Nothing to do in a world of one."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather_objects(value) -> list:
    """One value from each rank, in order of rank; every process gets the list."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def relative_difference(found, wanted) -> float:
    """How far gradients (or weights) are from those of the reference: the worst parameter's relative error.

    Parameters
    ----------
    found, wanted : dict of str to torch.Tensor
        By parameter name; only the names in `found` are compared (a rank of a cut model holds some of them).

    Returns
    -------
    float
        max over parameters of ``|found - wanted| / |wanted|`` in the 2-norm. A parameter whose gradient is zero but
        for rounding (a bias before a batch norm) is measured against 1 % of the whole gradient's norm instead.
    """
    norms = {name: torch.linalg.vector_norm(wanted[name].double()).item() for name in wanted}
    floor = 0.01 * sum(n**2 for n in norms.values()) ** 0.5
    differences = [
        torch.linalg.vector_norm(value.double().cpu() - wanted[name].double().cpu()).item() / max(norms[name], floor)
        for name, value in found.items()
    ]
    return max(differences, default=0.0)


class Steps:
    """Losses and right answers of the steps since the last look, still on the device."""

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
            A pair of numbers a step: mean loss over the global batch, right answers in it.
        seconds : float
            Time a step took, averaged over these steps.
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
        """Leave out what happened since the last look (validation, a checkpoint)."""
        self.clock = time.perf_counter()


class RunLog:
    """The run's folder: ``metrics.jsonl``, a line a step and an epoch, written by rank 0 only.

    Parameters
    ----------
    out : str
    active : bool
        Whether this process writes.
    resumed : tuple of (int, int), optional
        Epoch and step from which a run goes on in its own folder. None: a new run.

    Raises
    ------
    UserError
        The folder cannot be written.
    """

    def __init__(self, out, active, resumed=None):
        self.folder, self.active = Path(out), active
        self.path = self.folder / "metrics.jsonl"
        if not active:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if resumed is None and self.path.exists():
                self.path.replace(self.folder / "metrics.previous.jsonl")
            elif self.path.exists():
                self._drop_after(*resumed)
            self.file = self.path.open("a", buffering=1)
        except OSError as error:
            raise UserError(f"cannot write to --out {out}: {error.strerror}; name a folder of your own") from None

    def _drop_after(self, epoch, step):
        """A resumed run writes on from its checkpoint: forget the lines of what is done again."""
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # half a line: the run was killed while it wrote
                continue
            if row["step"] <= step and (row["event"] != "epoch" or row["epoch"] < epoch):
                kept.append(line + "\n")
        self.path.write_text("".join(kept))

    def write(self, event, **values):
        """Append one JSON object as a line."""
        if self.active:
            self.file.write(json.dumps({"event": event, **values}) + "\n")

    def finish(self, summary):
        """Write ``summary.json`` and close."""
        if self.active:
            self.file.close()
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
