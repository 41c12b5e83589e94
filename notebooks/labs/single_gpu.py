"""What sitting 73 times and reads: a training step, products beside it, and what the course has recorded on an H100."""

import gzip
import json
import logging
from collections import Counter
from functools import partial
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from mpdemo import data, models
from mpdemo.labs.alternately import seconds
from mpdemo.paths import root

RECORDS = root() / "notebooks" / "gpu"
# a compilation warns of a missing CUDA
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
KINDS = {"nvjet": "matrix products", "multi_tensor": "AdamW", "sdpa": "attention", "copy": "casts"}


class Training:
    """The course model on this machine's device, and 64 digits."""

    def __init__(self):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = accelerator or torch.device("cpu")
        self.model = models.build("transformer").to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        images, labels = data.load("digits").train.tensors
        self.images, self.labels = images[:64].to(self.device), labels[:64].to(self.device)

    def wait(self):
        """Wait until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def loss(self, forward=None):
        return cross_entropy((forward or self.model)(self.images), self.labels)

    def step(self, forward=None):
        """Do one step."""
        self.loss(forward).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def alternately(self, *works):
        """Return the milliseconds of each work, timed alternately until the device has done it."""

        def done(work):
            work()
            self.wait()

        times = seconds({number: partial(done, work) for number, work in enumerate(works)})
        return [1000 * median(own) for own in times.values()]


def h100(part):
    """Print the rows that the course's H100 has measured, of its "gpt" or its "resnet"."""
    parts = json.loads((RECORDS / "2026-11-27-4-h100.json").read_text())["parts"]
    for row in next(found for found in parts if found["part"] == part)["rows"]:
        speed = row.get("tokens_per_second") or row["images_per_second"]
        print(
            f"{' + '.join(row['options']) or 'eager':32}{speed:7,.0f} per s, MFU {row['mfu']:4.0%}, "
            f"{row['peak_memory_gib']:.1f} GiB, first step {row['first_step_seconds']:4.1f} s"
        )


def kernels() -> Counter:
    """Return the ms per step of each kind of kernel in a trace of the H100's GPT, and of the step as "whole step"."""
    trace = json.loads(gzip.decompress((RECORDS / "2026-11-27-h100-trace.json.gz").read_bytes()))
    events, times = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"], Counter()
    for event in events:
        kind = next((kind for word, kind in KINDS.items() if word in event["name"]), "all other")
        times[kind] += event["dur"] / 3000  # of three steps
    end = max(event["ts"] + event["dur"] for event in events)
    times["whole step"] = (end - min(event["ts"] for event in events)) / 3000
    return times
