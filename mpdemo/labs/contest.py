"""Time several trainings against each other in one world: in turn, round after round.

A speed-up from two runs an hour apart compares what else the machine did. Here every round runs every variant once,
and what is reported is the median over the rounds, with its spread. Used by ``demo`` and ``bench``.
"""

import os
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

from mpdemo.timeline import read
from mpdemo.training.measure import gather_objects

WARMUP = 2  # rounds that are not counted


class Contest:
    """The variants of one comparison and the seconds each took, a number a round."""

    def __init__(self, world):
        self.world, self.variants, self.seconds = world, {}, {}

    def add(self, name, step, *, alone=False, all_cores=False):
        """Add a variant: `step` is called once a round by every rank, or by rank 0 `alone` while the others rest."""
        self.variants[name] = (step, alone, all_cores)

    def run(self, rounds, warmup=WARMUP, each_round=lambda done: None):
        """Run all variants in turn, `rounds` times; call `each_round` with the number done."""
        for number in range(-warmup, rounds):
            for name, (step, alone, all_cores) in self.variants.items():
                seconds = self._once(step, self.world.rank == 0 or not alone, all_cores)
                if number >= 0:
                    self.seconds.setdefault(name, []).append(seconds)
            each_round(max(0, number + 1))

    def _once(self, step, active, all_cores):
        """Seconds from the moment all ranks are ready until all are done."""
        cores = use_all_cores() if all_cores else None
        dist.barrier()
        begin = time.perf_counter()
        if active:
            step()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds = time.perf_counter() - begin
        if cores:
            os.sched_setaffinity(0, cores)
        return seconds

    def median(self, name) -> float:
        """Median seconds a step."""
        return statistics.median(self.seconds[name])

    def ratio(self, slow, fast) -> tuple[float, float, float]:
        """How many times faster `fast` is: median over the rounds of the ratio in each, and the middle half's edges."""
        ratios = [a / b for a, b in zip(self.seconds[slow], self.seconds[fast], strict=True)]
        return statistics.median(ratios), *quartiles(ratios)


def quartiles(values) -> list[float]:
    """The edges of the middle half."""
    values = sorted(values)
    return [values[len(values) // 4], values[(3 * len(values)) // 4]]


def use_all_cores():
    """Let this process use every core of the machine; return the cores it was pinned to."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count()))
    return pinned


def training_step(rung, optimizer, images, labels):
    """Return a function that does one step of the training loop on this batch: zero, gradients, update.

    Where the rung has a recorder, every step is recorded.
    """

    def step():
        with rung.recorder.step() if rung.recorder else nullcontext():
            optimizer.zero_grad()
            rung.step(images, labels)
            optimizer.step()

    return step


def recorded_steps(rung) -> list:
    """Return the counted steps that a process-a-device rung recorded, of all ranks; all of them must call this."""
    return [read.merge(list(parts)) for parts in zip(*gather_objects(rung.recorder.steps), strict=True)][WARMUP:]
