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
    record_updates,
    recorded_steps,
    relative_difference,
)
from mpdemo.settings import CUT_RUNGS, is_per_device, records_timeline
from mpdemo.training.log import RunLog
from mpdemo.training.setup import build_model
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects, rest, sum_over_ranks
from mpdemo.world.devices import shared_cores
from mpdemo.world.env import join_world

WARMUP = 2  # rounds that are not counted
SINGLE, INDEPENDENT = "single", "independent"  # names of what is compared with
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

    def run(self, rounds, warmup=WARMUP, title=None):
        """Run all variants alternately, `rounds` times; a `title` shows a progress bar on rank 0.

        Each round has an order of its own, the same on all ranks, since a fixed one favours a variant by its place.
        """
        for number in tqdm(
            range(-warmup, rounds), desc=title, unit="round", disable=not title or self.world.rank > 0
        ):
            for name, trial in random.Random(number).sample(list(self.trials.items()), len(self.trials)):
                seconds = self._time_step(trial)
                if number >= 0:
                    self.seconds.setdefault(name, []).append(seconds)

    def _time_step(self, trial):
        """Return the seconds from the moment all ranks are ready until all are done."""
        rest()
        begin = time.perf_counter()
        if trial:
            trial.step()
            for device in trial.devices:
                clock.wait(device)
        rest()
        return time.perf_counter() - begin

    def loss(self, name) -> float:
        """Do one more step; return its loss over the whole batch. All ranks must call this."""
        trial = self.trials[name]
        loss = trial.step() if trial else torch.zeros((), device=self.world.device)
        return sum_over_ranks(loss.double()).item() / (trial.rung.replicas if trial else 1)

    def median(self, name) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds[name])


def compare(variants, world, *given) -> Comparison:
    """Return the trials of `variants`, settings by name, and of what bounds their speed; all ranks must call this."""
    comparison = Comparison(world, *given)
    single = variants[SINGLE]
    for name, settings in variants.items():
        timeline = records_timeline(settings)  # its upper bound is read from it
        trial = comparison.add(name, replace(settings, timeline=timeline))
        if timeline:
            record_updates(trial.rung.optimizer, trial.run.recorder)
    comparison.errors = gradient_differences(comparison)
    comparison.add(
        INDEPENDENT, replace(single, batch_size=single.batch_size // world.world_size), everywhere=True
    )
    return comparison


def measured_rows(comparison, variants) -> list[dict]:
    """Return a row for each variant of a comparison that has run; all ranks must call this."""
    rows, single = [], comparison.seconds[SINGLE]
    for name, settings in variants.items():
        seconds = comparison.seconds[name]
        least = least_seconds(comparison, name, settings)
        threads = settings.rung == "data_parallel" and comparison.world.device.type == "cpu"
        row = {"rung": settings.rung, "strategy": settings.rung + " (threads)" * threads}
        row["note"] = THREADS if threads else None
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
    model is cut: as the schedule is simulated, with the operations' times of the same step.
    """
    if settings.rung == SINGLE:
        return comparison.seconds[SINGLE]
    if settings.rung not in CUT_RUNGS:
        return comparison.seconds[INDEPENDENT]
    trial, cores = comparison.trials[name], shared_cores()
    schedule = "GPipe" if settings.rung == "model_parallel" else trial.s.schedule
    # not the warm-up, nor a step for its gradients
    timed = recorded_steps(trial)[-len(comparison.seconds[name]) :]
    return [predict_seconds(step, schedule, cores) for step in timed]


def gradient_differences(comparison) -> dict:
    """Return the largest relative difference of every variant's gradients from the single device's, by name."""
    single, reference = comparison.trials[SINGLE], None
    # through the host's memory: a GPU's tensors arrive on the GPU of the same number, in every process
    if single:
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
    images, labels = (
        torch.stack([torch.as_tensor(x) for x in column]) for column in zip(*samples, strict=True)
    )
    images = dataset.prepare(images)
    model = build_model(replace(settings, image_size=images.shape[-1]), dataset.classes, dataset.channels)
    return model, (images, labels)
