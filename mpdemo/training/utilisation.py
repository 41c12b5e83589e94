"""How well a run uses its devices: their utilisation, and the share of their peak that the model reaches, MFU.

MFU (model FLOPs utilisation) counts the operations of one forward and backward pass, however they are spread over
devices or recomputed. So for every rung the whole model's operations are counted, on fake tensors, before the first
step. Taught in notebooks/09_scaling.ipynb. Source: https://arxiv.org/abs/2204.02311 (appendix B).
"""

import contextlib
import math
import time
from statistics import fmean, median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from mpdemo.models.private_torch import FakeTensors
from mpdemo.settings.rules import LINEAR
from mpdemo.training.setup import build_model
from mpdemo.world import clock
from mpdemo.world.gpus import GPUS, named

SIDE = 512  # of the matrices whose product is measured where no data sheet is known
REPEATS = 6  # of that product: some ms
NO_GPU = "This run used no GPU, so GPU utilisation and GPU memory are not measured."
NO_SENSOR = "(share not measured: pip install nvidia-ml-py)"


def flops_of_step(s, dataset) -> int:
    """Return the floating point operations of a step over the whole batch, forward and backward."""
    plain = sdpa_kernel(SDPBackend.MATH)  # the counter does not know the fused attention of CPUs
    untouched = torch.random.fork_rng(devices=[])  # the run's random numbers stay as they are
    with plain, untouched, FakeTensors(), FlopCounterMode(display=False) as counter:
        images = torch.empty(s.batch_size, dataset.channels, s.image_size, s.image_size, device="cpu")
        outputs = build_model(s, dataset.classes, dataset.channels)(images)
        cross_entropy(outputs, torch.zeros(s.batch_size, dtype=torch.long, device="cpu")).backward()
    return counter.get_total_flops()


def peak_of(device, s) -> tuple[float, str]:
    """Return the operations per second that a device reaches at most, and where the number comes from."""
    kind = s.precision
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        sheet = GPUS[part].peaks if (part := named(name)) else {}
        convolutions = s.model not in LINEAR and torch.backends.cudnn.allow_tf32  # PyTorch's default for them alone
        if kind == "fp32" and convolutions and "tf32" in sheet:
            kind = "tf32"
        if kind in sheet:
            return sheet[kind], f"data sheet of {name}, {kind}"
    side = SIDE if device.type == "cpu" else 16 * SIDE
    a = torch.ones(side, side, device=device, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    times = [clock.now(device)]
    for _ in range(REPEATS):
        torch.mm(a, a)
        times.append(clock.now(device))
    seconds = min(end - begin for begin, end in zip(times, times[1:], strict=False))
    return 2 * side**3 / seconds, f"measured matrix product, {kind}"


class Utilisation:
    """Utilisation and MFU of a run: rank 0 knows what a step computes, and has the readings of all devices."""

    def __init__(self, run):
        self.devices = run.devices
        self.count = run.world * len(run.devices)
        if run.rank == 0:
            self.flops = flops_of_step(run.s, run.dataset)
            self.peak, self.source = peak_of(run.device, run.s)
        self.lines = []  # (utilisation of each device, MFU)
        self.last_reading = time.perf_counter(), time.process_time()

    def of_own_devices(self) -> list[float]:
        """Return the share of time that each device computed: a GPU by its sensor, a core since the last reading."""
        if self.devices[0].type == "cuda":
            with contextlib.suppress(Exception):  # no nvidia-ml-py, or a driver without this sensor
                return [torch.cuda.utilization(device) / 100 for device in self.devices]
            return [math.nan] * len(self.devices)
        begin, computed_before = self.last_reading
        now, computed = self.last_reading = time.perf_counter(), time.process_time()
        share = (computed - computed_before) / (now - begin) / len(self.devices)
        return [min(share, 1.0)] * len(self.devices)  # what sends messages may compute on another core

    def line(self, shares, seconds) -> dict:
        """Return utilisation and MFU for a line of rank 0's metrics; a step took `seconds`."""
        mfu = self.flops / seconds / (self.peak * self.count)
        measured = None if math.isnan(sum(shares)) else [round(share, 3) for share in shares]
        self.lines.append((measured, mfu))
        return {"utilisation": measured, "mfu": round(mfu, 4)}

    def summary(self) -> dict:
        """Return what the summary says: the mean of each device, and the median MFU."""
        shares = [row for row, _ in self.lines if row]
        return {
            "utilisation": [round(fmean(of_device), 3) for of_device in zip(*shares, strict=True)] or None,
            "mfu": round(median(mfu for _, mfu in self.lines), 4) if self.lines else None,
            "flops_per_step": self.flops,
            "peak_flops_per_device": self.peak,
            "peak_from": self.source,
        }

    def sentence(self, peak_memory) -> str:
        """Return in words what the summary says, and what was not measured."""
        found, gpu = self.summary(), self.devices[0].type == "cuda"
        if found["mfu"] is None:
            return "Only the first step was timed, which warms up, so neither utilisation nor MFU is known."
        what = ("GPU" if gpu else "CPU core") + ("s were" if self.count > 1 else " was")
        share = f"{fmean(found['utilisation']):.0%} of the time" if found["utilisation"] else NO_SENSOR
        peak = f"{found['mfu']:.1%} of the peak (MFU; {self.peak / 1e12:.3g} TFLOP/s: {self.source})"
        text = f"The {what} busy {share} and reached {peak}, with at most {max(peak_memory):.0f} MiB"
        return f"{text}." if gpu else f"{text} in a process. {NO_GPU}"
