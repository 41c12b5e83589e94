"""Peak memory of every device of a training run, and its messages, on a machine without any GPU (dry_run.py).

It is what ``torch.cuda.max_memory_allocated`` would report. Not counted is memory that is no tensor: the workspaces
that cuDNN and cuBLAS ask for while a convolution or a matrix product runs (64 to 92 MiB were measured on an H100), and
the CUDA context, which no PyTorch counter shows. `RESERVE` covers both. DDP averages gradients in C++, and
DataParallel computes in threads, so both are single and what they add to it.
Taught in notebooks/04_model_parallel.ipynb.
"""

from dataclasses import replace
from typing import NamedTuple

from mpdemo.predict.dry_run import step
from mpdemo.predict.request import ModelSpec
from mpdemo.settings.rules import CUT_RUNGS
from mpdemo.settings.schedules import usual_stages_per_rank

SIZES = 8, 64  # samples of a part in two dry runs; other sizes lie on their line


class Counted(NamedTuple):
    """What one process holds, by device, and sends: collective -> bytes."""

    devices: list
    messages: dict
    buffers: int = 0  # bytes that DDP broadcasts
    trained: int = 0  # bytes of all gradients of the first device


def of_training(settings) -> list[Counted]:
    """Return what every process of a training run holds and sends, from its checked settings."""
    from mpdemo import data

    s = settings
    facts = data.load(s.dataset, s.data, s.image_size, s.seed)
    spec = ModelSpec(s.model, s.image_size, facts.classes, facts.channels, s.norm)
    return processes(spec, s, {"sgd": 1, "adamw": 2}[s.optimizer])  # this course's SGD has momentum


def processes(spec, settings, states) -> list[Counted]:
    """Return what every process of a training run holds and sends; not to be called within a process group."""
    s = settings
    if s.rung in ("ddp", "data_parallel"):
        return _replicas(spec, s, states)
    alike = [rank % s.devices for rank in range(s.processes)]
    cut = s.form == "per-device" and s.rung in CUT_RUNGS  # the other replicas are like the first
    ranks = [alike.index(stage) for stage in range(s.devices)] if cut else [0]
    played = [of_rank(spec, s, rank, states) for rank in ranks]
    return [played[number % len(played)] for number in alike]


def of_rank(spec, settings, rank, states, keep_gradients=False) -> Counted:
    """Return what one rank holds and sends, from few dry runs: more microbatches or larger ones add the same each."""
    s, count, P = settings, settings.microbatches, settings.devices
    size = s.batch_size // (P if s.rung == "fsdp" else s.replicas or 1) // count

    def run(number):
        return _step(spec, s, number, size, rank, states, keep_gradients)

    if s.rung not in CUT_RUNGS:
        small = run(min(count, 2))
        if count <= 2:
            return _counted(small)
        before, found = run(1), _counted(small)
        devices = [d.with_peak(d.peak + (count - 2) * small.batch // 2) for d in found.devices]
        sent = {kind: a + (count - 2) * (a - before.messages.get(kind, 0)) for kind, a in found.messages.items()}
        return found._replace(devices=devices, messages=sent)
    several = s.form == "per-device" and usual_stages_per_rank(s.schedule) > 1
    few, more = (2 * P, P) if several else (P + 1, 1)
    if count <= 2 * few + more or (count - few) % more:
        return _counted(run(count))
    small, large, times = _counted(run(few)), _counted(run(few + more)), (count - few) // more
    devices = [
        a.with_peak(a.peak + times * (b.peak - a.peak))
        for a, b in zip(*(c.devices for c in (small, large)), strict=True)
    ]
    sent = {kind: a + times * (large.messages[kind] - a) for kind, a in small.messages.items()}
    return small._replace(devices=devices, messages=sent)


def _step(spec, settings, count, size, *others):
    """Return the dry run of one rank with `count` microbatches of `size` samples."""
    shares = settings.devices if settings.rung == "fsdp" else settings.replicas or 1

    def run(samples):
        return step(spec, replace(settings, microbatches=count, batch_size=samples * count * shares), *others)

    if settings.rung in CUT_RUNGS:
        return run(size)
    small, large = map(run, SIZES)
    return small.towards(large, (size - SIZES[0]) / (SIZES[1] - SIZES[0])) or run(size)


def _counted(found) -> Counted:
    return Counted(found.devices(), found.messages, found.buffers, found.always[0].gradients)


def _replicas(spec, settings, states) -> list[Counted]:
    """Return what DDP's processes hold, or the devices of one process: each is a single device with its share.

    DDP keeps the gradients from one step to the next, in its buckets; those of several parts are added up beside them.
    """
    s, ddp, parts = settings, settings.rung == "ddp", settings.microbatches
    alone = replace(s, rung="single", form="one-process", batch_size=s.batch_size // s.devices, devices=1, processes=1)
    (device,), _, buffers, trained = of_rank(spec, alone, 0, states, ddp and parts == 1)
    if not ddp:
        return [Counted([device, *[replace(device, optimizer=0)] * (s.devices - 1)], {})]
    sent = {"all-reduce": trained} | ({"broadcast": buffers} if buffers else {})
    if parts > 1:
        device = replace(device, gradients=device.gradients + trained)
    return [Counted([device], sent, buffers, trained)] * s.devices
