"""What every measurement stands on: join a world of processes, and time several trials (trial.py) alternately.

A speed-up from two runs an hour apart compares what else the machine did. Here every round runs every variant once,
and what is reported are medians over the rounds, their ratios, and the spread. Used by labs, ``demo`` and ``bench``.
"""

import statistics
import time

from tqdm import tqdm

from mpdemo.training.log import RunLog
from mpdemo.trial import Trial, all_cores, is_per_device, join_world, rest
from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects

WARMUP = 2  # rounds that are not counted


def write_result(out, measure):
    """Call a function of the world in every process; rank 0 writes its result to ``summary.json`` in `out`."""
    with join_world() as world:
        result = measure(world)
    RunLog(out, world.rank == 0).finish(result)


def run_lab(functions, out, names):
    """Call functions of the world by name, as `write_result` does; each result is a list with one entry per rank."""
    write_result(out, lambda world: {name: gather_objects(functions[name](world)) for name in names})


class Comparison:
    """Variants of a training, timed alternately in one world."""

    def __init__(self, world, model=None, batch=None):
        self.world, self.model, self.batch = world, model, batch
        self.trials = {}  # by name; None where a variant runs on rank 0 alone and this is another rank
        self.seconds = {}  # per step, by name: one number per round

    def add(self, name, settings, *, everywhere=False) -> Trial | None:
        """Add a variant. One-process forms run on rank 0 while the others rest, or `everywhere` at the same time."""
        active = everywhere or is_per_device(settings) or self.world.rank == 0
        self.trials[name] = Trial(settings, self.world, self.model, self.batch) if active else None
        return self.trials[name]

    def run(self, rounds, warmup=WARMUP, title=None, again=False, batches=None):
        """Run all variants alternately, `rounds` times; a `title` shows a progress bar on rank 0.

        A step that follows one of another variant finds the caches full of that one's numbers. With `again` each
        variant does two steps, and the second is counted, which follows one of its own as in a training run. An
        iterator `batches` gives each round a batch of its own, so that all variants are trained; by default each
        repeats its first one.
        """
        for number in tqdm(range(-warmup, rounds), desc=title, unit="round", disable=not title or self.world.rank > 0):
            batch = next(batches) if batches else None
            for name, trial in self.trials.items():
                seconds = [self._time_step(trial, batch) for _ in range(1 + again)][-1]
                if number >= 0:
                    self.seconds.setdefault(name, []).append(seconds)

    def _time_step(self, trial, batch):
        """Return the seconds from the moment all ranks are ready until all are done."""
        with all_cores(trial is not None and trial.all_cores):
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

    def ratio(self, slow, fast) -> tuple[float, float, float]:
        """How many times faster `fast` is: the ratio of the medians, and the quartiles of the rounds' ratios.

        Ratios of medians agree with each other: a speed-up divided by its bound is the share of the bound.
        """
        ratios = [a / b for a, b in zip(self.seconds[slow], self.seconds[fast], strict=True)]
        return self.median(slow) / self.median(fast), *quartiles(ratios)


def quartiles(values) -> list[float]:
    """The edges of the middle half."""
    values = sorted(values)
    return [values[len(values) // 4], values[(3 * len(values)) // 4]]
