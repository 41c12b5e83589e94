"""What every measurement stands on: several trials (trial.py) of one world of processes, timed alternately.

A speed-up from two runs an hour apart compares what else the machine did. Here every round runs every variant once,
and the ratios are paired by round (paired.py). `compare` puts rungs of the ladder beside the single device: speed, its
upper bound, and gradients. Used by labs, ``demo`` and tests/bench.
"""

import random
import statistics
import time
from dataclasses import replace

import torch
from tqdm import tqdm

from mpdemo import data
from mpdemo.measure.paired import ratio, to_row
from mpdemo.measure.timeline import predict_seconds
from mpdemo.measure.trial import (
    Trial,
    form_of,
    is_per_device,
    join_world,
    record_updates,
    recorded_steps,
    relative_difference,
)
from mpdemo.settings.rules import CUT_RUNGS, records_timeline
from mpdemo.training.log import RunLog
from mpdemo.training.setup import build_model
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects, rest
from mpdemo.world.devices import shared_cores

WARMUP = 2  # rounds that are not counted
SINGLE, INDEPENDENT, IN_PARTS = "single", "independent", "single, microbatches"  # names of what is compared with
THREADS = (
    "data_parallel (threads): nn.DataParallel needs GPUs. On CPU cores, threads of one process do the same moves and "
    "share its memory, so this row says nothing about the speed of nn.DataParallel."
)


def write_result(out, measure):
    """Call a function of the world in every process; rank 0 writes its result and the `device_type` into `out`."""
    with join_world() as world:
        result = measure(world)
    RunLog(out, world.rank == 0).finish(result | {"device_type": world.device.type})


class Comparison:
    """Variants of a training run, timed alternately in one world."""

    def __init__(self, world, *given):
        self.world, self.given = world, given  # model and batch, as for `Trial`
        self.trials = {}  # by name; None where a variant runs on rank 0 alone and this is another rank
        self.seconds = {}  # per step, by name: one number per round
        self.errors = {}  # of the gradients, by name, where `compare` made it

    def add(self, name, settings, *, everywhere=False) -> Trial | None:
        """Add a variant. One-process forms run on rank 0 while the others rest, or `everywhere` at the same time."""
        active = everywhere or is_per_device(settings) or self.world.rank == 0
        self.trials[name] = Trial(settings, self.world, *self.given) if active else None
        return self.trials[name]

    def run(self, rounds, warmup=WARMUP, title=None, batches=None):
        """Run all variants alternately, `rounds` times; a `title` shows a progress bar on rank 0.

        Each round has an order of its own, the same on all ranks, since a fixed one favours a variant by its place.
        An iterator `batches` gives each round a batch of its own, so that all are trained.
        """
        for number in tqdm(range(-warmup, rounds), desc=title, unit="round", disable=not title or self.world.rank > 0):
            batch = next(batches) if batches else None
            for name, trial in random.Random(number).sample(list(self.trials.items()), len(self.trials)):
                seconds = self._time_step(trial, batch)
                if number >= 0:
                    self.seconds.setdefault(name, []).append(seconds)

    def _time_step(self, trial, batch):
        """Return the seconds from the moment all ranks are ready until all are done."""
        rest()
        begin = time.perf_counter()
        if trial:
            trial.step(batch)
            for device in trial.devices:
                clock.wait(device)
        rest()
        return time.perf_counter() - begin

    def median(self, name) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds[name])


def compare(variants, world, *given) -> Comparison:
    """Return the trials of `variants`, settings by name, and of what bounds their speed; all ranks must call this."""
    comparison = Comparison(world, *given)
    single = variants[SINGLE]
    for name, settings in variants.items():
        timeline = records_timeline(settings.rung, form_of(settings))  # its upper bound is read from it
        trial = comparison.add(name, replace(settings, timeline=timeline))
        if timeline:
            record_updates(trial.rung.optimizer, trial.run.recorder)
    comparison.errors = gradient_differences(comparison)
    comparison.add(INDEPENDENT, replace(single, batch_size=single.batch_size // world.world_size), everywhere=True)
    in_parts = [s for s in variants.values() if s.rung == "pipeline" and not is_per_device(s)]
    for settings in in_parts[:1]:  # one process on one device, which computes the same microbatches
        comparison.add(IN_PARTS, replace(single, microbatches=settings.microbatches))
    return comparison


def measured_rows(comparison, variants) -> list[dict]:
    """Return a row for each variant of a comparison that has run; all ranks must call this."""
    rows, single = [], comparison.seconds[SINGLE]
    for name, settings in variants.items():
        seconds = comparison.seconds[name]
        least = least_seconds(comparison, name, settings)
        threads = settings.rung == "data_parallel" and comparison.world.device.type == "cpu"
        row = {"rung": settings.rung, "strategy": settings.rung + " (threads)" * threads, "form": form_of(settings)}
        row["note"] = THREADS if threads else None
        row["processes"] = comparison.world.world_size if is_per_device(settings) else 1
        row["device_type"] = comparison.world.device.type
        row["images_per_second"] = settings.batch_size / comparison.median(name)
        fraction = ratio(least, seconds)
        row.update(to_row("speedup", ratio(single, seconds)))
        row.update(to_row("bound", ratio(single, least)))
        row.update(to_row("fraction_of_bound", fraction))
        row["at_bound"] = name != SINGLE and fraction.reaches_1
        row["max_relative_gradient_error"] = comparison.errors[name]
        rows.append(row)
    return rows


def least_seconds(comparison, name, settings) -> list[float]:
    """Return the least that a variant's step could take, in each round; all ranks must call this.

    Where the devices share the batch or each layer: as long as processes that do not talk to each other. Where the
    model is cut: as the schedule is simulated, with the operations' times of the same step. A CPU operator blocks the
    one process that drives several devices, so these never overlap: as long as the single device with such parts.
    """
    if settings.rung == SINGLE:
        return comparison.seconds[SINGLE]
    if settings.rung not in CUT_RUNGS:
        return comparison.seconds[INDEPENDENT]
    if not is_per_device(settings):
        if comparison.world.device.type == "cpu":
            return comparison.seconds[IN_PARTS if settings.rung == "pipeline" else SINGLE]
        others = [other for other in comparison.trials.values() if other and other.s.rung == settings.rung]
        trial = next(other for other in others if is_per_device(other.s))
    else:
        trial = comparison.trials[name]
    cores = shared_cores()
    schedule = "GPipe" if settings.rung == "model_parallel" else trial.s.schedule
    timed = recorded_steps(trial)[-len(comparison.seconds[name]) :]  # not the warm-up, nor a step for its gradients
    return [predict_seconds(step, schedule, cores) for step in timed]


def gradient_differences(comparison) -> dict:
    """Return the largest relative difference of every variant's gradients from the single device's, by name."""
    single, reference = comparison.trials[SINGLE], None
    if single:  # through the host's memory: a GPU's tensors arrive on the GPU of the same number, in every process
        reference = {name: gradient.cpu() for name, gradient in single.gradients().items()}
    reference = gather_objects(reference)[0]
    errors = {}
    for name, trial in comparison.trials.items():
        error = relative_difference(trial.gradients(), reference) if trial else 0.0
        errors[name] = max(gather_objects(error))
    return errors


def model_and_batch(settings):
    """Return the model with its initial weights, and one batch of real images: (B, C, S, S) and (B,)."""
    dataset = data.load(settings.dataset, settings.data, settings.image_size or 28, settings.seed)
    samples = [dataset.train[i] for i in range(settings.batch_size)]
    images, labels = (torch.stack([torch.as_tensor(x) for x in column]) for column in zip(*samples, strict=True))
    images = dataset.prepare(images)
    model = build_model(replace(settings, image_size=images.shape[-1]), dataset.classes, dataset.channels)
    return model, (images, labels)


def as_variants(rows) -> dict:
    """Return settings by name, as `compare` takes them: "single" first, and each other one as RUNG FORM."""
    return {SINGLE if s.rung == SINGLE else f"{s.rung} {form_of(s)}": s for s in rows}
