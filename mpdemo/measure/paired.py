"""The one rule of statistics: the median of the rounds' paired ratios, with its bootstrap 95 % interval.

Two variants that are timed alternately share each round's disturbances, so the ratio is taken round by round. A
fraction of an upper bound is a paired ratio of its own, not the quotient of two printed medians. A difference is
reported only where the interval leaves 1 out; below `LEAST_ROUNDS` rounds there is no interval and no verdict. Of 3,000
simulated comparisons of equals, with 9 rounds 4 % were reported as different, with 6 to 15 rounds 4 to 12 %. Of equal
steps that were timed 9 times each on a busy machine 32 % were, since every round had the same order; with the places
within each round permuted it was 5 %. So `mpdemo.measure.compare` changes the order from round to round.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

# of every measurement; the tests ask for 2, which only run the code
ROUNDS = int(os.environ.get("MPDEMO_ROUNDS", 9))
LEAST_ROUNDS = 6
RESAMPLES = 10_000
DIGITS = ".2f"


class Median(NamedTuple):
    """The median of the rounds, and the ends of its 95 % interval; None where there are too few rounds."""

    median: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> list[float] | None:
        """The two ends, as a result's JSON holds them."""
        return None if self.low is None or self.high is None else [self.low, self.high]


class Ratio(Median):
    """The median of paired ratios, with its interval."""

    @property
    def differs(self) -> bool:
        """Whether a difference may be reported: the interval leaves 1 out."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def reaches_1(self) -> bool:
        """Whether no shortfall from 1 may be reported; False, too, where there is no interval."""
        return self.high is not None and self.high >= 1

    def __str__(self) -> str:
        spread = "" if self.low is None else f" ({self.low:{DIGITS}} to {self.high:{DIGITS}})"
        return f"{self.median:{DIGITS}}{spread}"


def median(values: Iterable[float]) -> Median:
    """Return the median of any quantity that has one value per round, with its interval.

    This is the percentile bootstrap with a fixed seed: the same `values`, in any unit, give the same interval.
    """
    rounds = np.asarray(list(values), dtype=float)
    middle = float(np.median(rounds))
    if len(rounds) < LEAST_ROUNDS:
        return Median(middle)
    picked = np.random.default_rng(0).integers(0, len(rounds), (RESAMPLES, len(rounds)))
    low, high = np.quantile(np.median(rounds[picked], axis=1), [0.025, 0.975], method="inverted_cdf")
    return Median(middle, float(low), float(high))


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """Return how many times faster `fast` is than `slow`.

    Parameters
    ----------
    slow, fast : sequence of float
        Seconds of the two variants, one number per round, in the same order.

    Raises
    ------
    ValueError
        One has more rounds than the other.
    """
    return Ratio(*median([a / b for a, b in zip(slow, fast, strict=True)]))


def difference(more: Sequence[float], less: Sequence[float]) -> Median:
    """Return how much longer `more` takes than `less`, round by round; both as for `ratio`."""
    return median([a - b for a, b in zip(more, less, strict=True)])


def to_row(name: str, found: Median) -> dict[str, Any]:
    """Return a median and its interval as a result's JSON holds them: NAME and NAME_interval."""
    return {name: found.median, _interval_of(name): found.interval}


def from_row(row: dict[str, Any], name: str) -> Ratio:
    """Return a ratio that `to_row` put into a row."""
    return Ratio(row[name], *(row[_interval_of(name)] or ()))


def speed_texts(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return a row's speed-up, its upper bound, and the fraction of the bound, with their 95 % intervals."""
    speed, fraction = (str(from_row(row, name)) for name in ("speedup", "fraction_of_bound"))
    return speed, f"{row['bound']:.2f}", fraction + ", at the bound" * row["at_bound"]


def _interval_of(name: str) -> str:
    return f"{name.removesuffix('_of_bound')}_interval"  # fraction_of_bound has fraction_interval
