"""What more devices bring: the time of a fixed amount of work on N devices, fitted to few runs.

    time(N) = start + compute / N + communication * log2(N) * steps

The work is a number of images. The devices share its arithmetic (`compute`). Every step ends with an all-reduce,
whose price is taken to grow by the same amount with each doubling of the devices (`communication`), as that of a tree
does (https://doi.org/10.1177/1094342005051521); how many steps there are follows from the global batch of the run.
`start` does not shrink: start-up, the first batch, the last checkpoint. From the fit follows how many devices are worth
their hours (`advise`). Taught in notebooks/09_scaling.ipynb.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpdemo.errors import UserError

FEWEST = 3  # runs of a fit: as many as it has unknown terms
EFFICIENCY = 0.7
REACH = 4  # a fit is asked for no more than so many times the devices that it has seen


@dataclass(frozen=True)
class Run:
    """One measured run: on how many devices, for how many seconds, with how many images per step (all devices)."""

    devices: int
    seconds: float
    batch: int


@dataclass(frozen=True)
class Model:
    """A fitted model of the time."""

    images: int  # of the whole work
    compute: float  # seconds of all arithmetic on one device
    communication: float  # seconds that each doubling of the devices adds to a step
    start: float  # seconds that do not depend on the devices
    largest: int  # the most devices among the runs that it was fitted to

    def time(self, devices, batch):
        """Return the seconds on `devices` devices with `batch` images per step over all of them."""
        return float(_terms(devices, batch, self.images) @ (self.compute, self.communication, self.start))

    def efficiency(self, devices, batch):
        """Return the speed-up over one device, divided by the number of devices."""
        return self.time(1, 1) / self.time(devices, batch) / devices


def fit(runs: Sequence[Run], images: int) -> Model:
    """Fit a model to runs of the same work: least squares of the relative errors, no term below zero.

    Parameters
    ----------
    runs : sequence of Run
        At least three, the devices in rising order.
    images : int
        Of the whole work: a run has ``images / batch`` steps.

    Raises
    ------
    UserError
        Too few runs, a time or a number that is not above zero, devices that do not rise.

    Examples
    --------
    >>> from mpdemo.plan.imagenet import IMAGES, RUNS
    >>> model = fit(RUNS[:3], IMAGES)
    >>> [round(model.time(run.devices, run.batch) / run.seconds - 1, 3) for run in RUNS[3:]]
    [-0.026, -0.045, -0.288]
    """
    _check(runs, images)
    # In each row the seconds are divided by those of the run: an error of 1 % weighs the same for long and short runs.
    rows = np.array([_terms(run.devices, run.batch, images) / run.seconds for run in runs])
    return Model(images, *_not_negative(rows), largest=runs[-1].devices)


def _terms(devices, batch, images):
    """Return what each unknown of the model is multiplied by."""
    return np.array([1 / devices, math.log2(devices) * images / batch, 1.0])


def _not_negative(rows):
    """Solve ``rows @ x = 1`` by least squares with no x below zero, as ``scipy.optimize.nnls`` does.

    With three unknowns there are seven sets that may be above zero; of the best set's solution the rest is zero.
    """
    best, least = None, math.inf
    for count in (1, 2, 3):
        for chosen in map(list, itertools.combinations(range(3), count)):
            values = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)[0]
            error = float(((rows[:, chosen] @ values - 1) ** 2).sum())
            if (values >= 0).all() and error < least - 1e-15:
                best, least = np.zeros(3), error
                best[chosen] = values
    return [float(value) for value in best]


def _check(runs, images):
    """Refuse runs from which nothing can be fitted."""
    if len(runs) < FEWEST:
        raise UserError(f"{len(runs)} runs are too few for a fit; allowed: {FEWEST} or more, each on other devices")
    for name, value in [("images", images), *(pair for run in runs for pair in vars(run).items())]:
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name} {value} is not allowed in a fit; allowed: more than 0")
    devices = [run.devices for run in runs]
    if devices != sorted(set(devices)):
        raise UserError(f"devices {', '.join(map(str, devices))} do not rise; sort the runs, one run for each number")


def same_batch(batch: int) -> Callable:
    """Return `batch` for any number of devices: it stays the same, and each device gets a smaller share."""
    return lambda devices: batch


def same_share(share: int) -> Callable:
    """Return the batch for any number of devices where the `share` of one device, in images, stays the same."""
    return lambda devices: share * devices


@dataclass(frozen=True)
class Advice:
    """How many devices to take."""

    efficient: int  # the largest number with the wanted efficiency
    fastest: int  # the number with the least time
    most: int  # the largest number that was looked at; a `fastest` of `most` may lie further on


def advise(model: Model, batch: Callable, efficiency: float = EFFICIENCY) -> Advice:
    """Say how many devices are worth their hours, of up to `REACH` times the most that were measured.

    Parameters
    ----------
    model : Model
    batch : callable
        Devices -> global batch: `same_batch` or `same_share`.
    efficiency : float
        Of the useful hours among all that are paid: above 0, at most 1.

    Raises
    ------
    UserError
        An efficiency that is not allowed.
    """
    if not 0 < efficiency <= 1:
        raise UserError(f"efficiency {efficiency} is not allowed; allowed: above 0, at most 1, such as {EFFICIENCY}")
    most = REACH * model.largest
    numbers = [n for n in range(1, most + 1) if batch(n) >= n]  # each device needs an image
    good = [n for n in numbers if model.efficiency(n, batch(n)) >= efficiency]
    return Advice(max(good), min(numbers, key=lambda n: model.time(n, batch(n))), most)
