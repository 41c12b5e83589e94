"""The log of a run: losses, clock and memory, without making it wait; and its summary.

Reading a loss on the host (``loss.item()``) waits for the device. So losses are kept where they are computed, and
fetched together every few steps. Taught in notebooks/01_single_device.ipynb.
"""

import math
import os
import platform
import time
from collections import ChainMap
from itertools import chain
from pathlib import Path

import torch
from tqdm import tqdm

from mpdemo.errors import RunFailed
from mpdemo.training.log import RunLog
from mpdemo.training.utilisation import Utilisation
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

    def __init__(self, run, rung, progress, stop, resumed):
        self.run, self.rung = run, rung
        self.progress, self.stop = progress, stop
        self.lines = RunLog(run.folder, run.rank == 0, (progress.epoch, progress.step) if resumed else None)
        self.utilisation = Utilisation(run)
        self.scores = []  # of the steps since the last flush, still on the device

    def __enter__(self):
        s, progress = self.run.s, self.progress
        self.begin = time.time()
        source = {"resume": s.resume} if s.resume else {}
        self.lines.write("start", step=progress.step, steps=progress.last_step, time=round(self.begin, 4), **source)
        bar = {"total": progress.last_step, "initial": progress.step, "desc": s.rung, "unit": "step"}
        self.bar = tqdm(**bar, disable=True if self.run.rank > 0 else None)
        self.restart_clock()
        return self

    def __exit__(self, kind, *error):
        self.bar.close()
        if kind:
            return
        summary = summarise(self, time.time() - self.begin)
        self.lines.finish(summary)
        if self.run.rank == 0:
            print(self.utilisation.sentence(summary["peak_memory_mib"]))

    def step(self, result):
        """Keep a step's score, which a process without the outputs does not have; write the lines that are due."""
        self.scores.append(torch.zeros(2, dtype=torch.double, device=self.run.device) if result is None else result)
        if self.progress.step == 1 or self.progress.step % self.run.s.log_every == 0:
            self.flush()

    def restart_clock(self):
        """Leave out of the seconds per step what happened since the last flush (a checkpoint, a validation)."""
        self.clock = time.perf_counter()

    def fetch(self):
        """Return loss and correct predictions of each step kept, over all ranks; this waits for the device."""
        table = sum_over_ranks(torch.stack(self.scores).to(self.run.device))
        table[:, 0] /= self.rung.replicas  # each replica holds the mean over its own share
        self.scores = []
        return table.tolist()  # the one place that waits

    def flush(self):
        """Write one line for each step since the last flush, the last one with the memory."""
        if not self.scores:
            return
        run, progress = self.run, self.progress
        rows = self.fetch()
        seconds = (time.perf_counter() - self.clock) / len(rows)
        now = time.time()
        for number, (loss, correct) in enumerate(rows, progress.step - len(rows) + 1):
            if not math.isfinite(loss):
                raise RunFailed(f"the loss is {loss} at step {number}: the training diverged; lower --lr {run.s.lr}")
            line = {
                "step": number,
                "epoch": progress.epoch,
                "loss": loss,
                "images_per_second": round(run.s.batch_size / seconds, 2),
                "time": round(now - (progress.step - number) * seconds, 4),
            }
            if number == progress.step:
                readings = gather_objects((peak_memory_mib(run.devices), self.utilisation.of_own_devices()))
                memory, shares = zip(*readings, strict=True)
                line["peak_memory_mib"] = list(chain(*memory))
                if run.rank == 0 and number > 1:  # the first step warms up
                    line.update(self.utilisation.line(list(chain(*shares)), seconds))
            self.lines.write("step", **line)
            progress.epoch_steps.append((loss, correct, seconds))
            progress.loss = loss
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update(len(rows))
        self.restart_clock()

    def epoch(self, validation):
        """Write the line of an epoch, with loss and accuracy of its validation."""
        progress, batch = self.progress, self.run.s.batch_size
        loss, correct, seconds = (sum(row) / len(row) for row in zip(*progress.epoch_steps, strict=True))
        validation_loss, validation_accuracy = validation
        self.lines.write(
            "epoch",
            epoch=progress.epoch,
            step=progress.step,
            train_loss=loss,
            train_accuracy=correct / batch,
            validation_loss=validation_loss,
            validation_accuracy=validation_accuracy,
            images_per_second=round(batch / seconds, 2),
            time=round(time.time(), 4),
        )
        if self.run.rank == 0:
            said = f"validation loss {validation_loss:.4f}, accuracy {validation_accuracy:.1%}"
            self.bar.write(f"epoch {progress.epoch + 1}: step {progress.step}, {said}")
        self.restart_clock()


def summarise(log, seconds) -> dict:
    """Everything worth keeping of a run, `seconds` only since it was started or resumed; all ranks must call this."""
    run, progress = log.run, log.progress
    sizes = {name: parameter.numel() for name, parameter in log.rung.model.named_parameters()}
    of_this_rank = platform.node(), sizes, peak_memory_mib(run.devices)
    hosts, sizes_of_ranks, memory = zip(*gather_objects(of_this_rank), strict=True)
    loss, accuracy = progress.validation or (None, None)
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
        "stopped": log.stop.now,
        "steps": progress.step,
        "epochs": progress.epoch,
        "seconds": round(seconds, 3),
        "images": progress.step * run.s.batch_size,
        "parameters": sum(dict(ChainMap(*sizes_of_ranks)).values()),  # each counted once, whoever holds it
        "peak_memory_mib": list(chain(*memory)),
        "busy": log.utilisation.summary() if run.rank == 0 else None,
        "loss": progress.loss,
        "validation_loss": loss,
        "validation_accuracy": accuracy,
    }
