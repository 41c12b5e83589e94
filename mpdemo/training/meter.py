"""The log of a run: losses, clock and memory, without making it wait; and its summary.

Reading a loss on the host (``loss.item()``) waits for the device. So losses are kept where they are computed, and
fetched together every few steps. Taught in notebooks/12_one_step.ipynb.
"""

import math
import platform
import time
from itertools import chain
from pathlib import Path

import torch
from tqdm import tqdm

from mpdemo.errors import RunFailed
from mpdemo.training.log import RunLog
from mpdemo.world.collectives import gather_objects, sum_over_ranks


def peak_memory_mib(devices) -> list[float]:
    """Return the peak memory so far, in MiB, of each GPU that this process drives; on a CPU, of the process."""
    if devices[0].type == "cuda":
        return [round(torch.cuda.max_memory_allocated(device) / 2**20, 1) for device in devices]
    status = Path("/proc/self/status").read_text()  # ru_maxrss survives exec, so it may be the launcher's
    return [round(int(status.partition("VmHWM:")[2].split()[0]) / 2**10, 1)]  # Linux counts KiB


def score(loss, outputs, labels):
    """Return a batch's loss and correct predictions, or a part's, as one tensor on its device; does not wait for it."""
    correct = (outputs.detach().argmax(1) == labels.to(outputs.device)).sum()
    return torch.stack([loss.detach().double(), correct.double()])


class TrainingLog:
    """What a run says, in its folder and on the terminal: a line per step and epoch, a bar, a summary at its end."""

    def __init__(self, run, rung, last):
        self.run, self.rung, self.last = run, rung, last
        self.lines = RunLog(run.folder, run.rank == 0)
        self.done, self.scores, self.rows = 0, [], []  # steps; of those since the last flush; of this epoch
        self.validation = None

    def __enter__(self):
        self.begin = self.clock = time.perf_counter()
        self.lines.write("start", step=0, steps=self.last)
        self.bar = tqdm(
            total=self.last, desc=self.run.s.rung, unit="step", disable=True if self.run.rank > 0 else None
        )
        return self

    def __exit__(self, kind, *error):
        self.bar.close()
        if not kind:
            self.lines.finish(self.summary())

    def step(self, epoch, result):
        """Keep a step's score, which a process without the outputs does not have; write the lines that are due."""
        self.done += 1
        self.scores.append(
            torch.zeros(2, dtype=torch.double, device=self.run.device) if result is None else result
        )
        if self.done == 1 or self.done % self.run.s.log_every == 0:
            self.flush(epoch)

    def flush(self, epoch):
        """Write one line for each step since the last flush, the last one with the memory; waits for the device."""
        if not self.scores:
            return
        table = sum_over_ranks(torch.stack(self.scores).to(self.run.device))
        table[:, 0] /= self.rung.replicas  # each replica holds the mean over its own share
        seconds, rows = (time.perf_counter() - self.clock) / len(self.scores), table.tolist()
        speed = round(self.run.s.batch_size / seconds, 2)
        for number, (loss, _) in enumerate(rows, self.done - len(rows) + 1):
            if not math.isfinite(loss):
                lower = f"the training diverged; lower --lr {self.run.s.lr}"
                raise RunFailed(f"the loss is {loss} at step {number}: {lower}")
            more = {"peak_memory_mib": self.memory()} if number == self.done else {}
            self.lines.write("step", step=number, epoch=epoch, loss=loss, images_per_second=speed, **more)
        self.rows += rows
        self.bar.set_postfix(loss=f"{rows[-1][0]:.4f}", refresh=False)
        self.bar.update(len(rows))
        self.scores, self.clock = [], time.perf_counter()

    def memory(self) -> list[float]:
        """Return the peak memory of each device of all ranks."""
        return list(chain(*gather_objects(peak_memory_mib(self.run.devices))))

    def epoch(self, epoch, validation):
        """Write the line of an epoch that was flushed, with loss and accuracy of its validation."""
        loss, correct = (sum(column) / len(column) for column in zip(*self.rows, strict=True))
        self.validation, self.rows = validation, []
        values = {"train_loss": loss, "train_accuracy": correct / self.run.s.batch_size}
        values |= {"validation_loss": validation[0], "validation_accuracy": validation[1]}
        self.lines.write("epoch", epoch=epoch, step=self.done, **values)
        if self.run.rank == 0:
            said = f"validation loss {validation[0]:.4f}, accuracy {validation[1]:.1%}"
            self.bar.write(f"epoch {epoch + 1}: step {self.done}, {said}")
        self.clock = time.perf_counter()

    def summary(self) -> dict:
        """Return what is worth keeping of a run; all ranks must call this."""
        run, (loss, accuracy) = self.run, self.validation
        environment = {"torch": torch.__version__, "hosts": gather_objects(platform.node())}
        device = torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu core"
        return {
            "settings": vars(run.s),
            "environment": environment | {"device": device, "launcher": run.place.launcher},
            "world_size": run.world,
            "steps": self.done,
            "seconds": round(time.perf_counter() - self.begin, 3),
            "peak_memory_mib": self.memory(),
            "validation_loss": loss,
            "validation_accuracy": accuracy,
        }
