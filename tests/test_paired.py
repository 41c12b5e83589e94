"""The rule of statistics: paired ratios, their interval, and how often it reports a difference between equals."""

import json

import numpy as np
import pytest

from mpdemo.measure.paired import LEAST_ROUNDS, Median, Ratio, difference, from_row, ratio, to_row


def test_ratios_and_differences_are_paired_so_that_a_drift_that_both_share_cancels():
    drift = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ratio([2.0 * d for d in drift], drift) == Ratio(2.0, 2.0, 2.0)
    assert difference([d + 0.5 for d in drift], drift) == Median(0.5, 0.5, 0.5)


def test_too_few_rounds_have_no_interval_and_no_verdict():
    few = ratio([2.0] * (LEAST_ROUNDS - 1), [1.0] * (LEAST_ROUNDS - 1))
    assert few == (2.0, None, None) and not few.differs and few.interval is None and str(few) == "2.00"


@pytest.mark.parametrize("rounds", range(LEAST_ROUNDS, 16))
def test_no_median_lies_outside_its_interval(rounds):
    draw = np.random.default_rng(rounds)
    for _ in range(20):
        found = ratio(draw.lognormal(size=rounds), draw.lognormal(size=rounds))
        assert found.low <= found.median <= found.high


@pytest.mark.parametrize(
    ("found", "differs", "reaches_1"),
    [
        (Ratio(0.9, 0.8, 0.99), True, False),
        (Ratio(0.95, 0.9, 1.0), False, True),
        (Ratio(1.1, 1.01, 1.2), True, True),
        (Ratio(1.1), False, False),
    ],
)
def test_a_verdict_follows_from_the_interval_which_a_row_of_json_holds(found, differs, reaches_1):
    """A difference only where the interval leaves 1 out; at the bound, where no shortfall can be reported."""
    assert (found.differs, found.reaches_1) == (differs, reaches_1)
    row = json.loads(json.dumps(to_row("fraction_of_bound", found)))
    assert row["fraction_interval"] == found.interval and from_row(row, "fraction_of_bound") == found


def test_equals_are_rarely_reported_as_different():
    draw = np.random.default_rng(0)
    pairs = [np.exp(0.03 * draw.standard_normal((2, 9))) for _ in range(300)]
    assert sum(ratio(*pair).differs for pair in pairs) / len(pairs) <= 0.08
