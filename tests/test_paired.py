"""The rule of statistics: paired ratios, their interval, and how often it reports a difference between equals."""

import json

import numpy as np
import pytest

from mpdemo.paired import LEAST_ROUNDS, Median, Ratio, difference, from_row, ratio, to_row


def test_a_drift_that_both_share_cancels():
    drift = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ratio([2.0 * d for d in drift], drift) == Ratio(2.0, 2.0, 2.0)


def test_too_few_rounds_have_no_interval_and_no_verdict():
    few = ratio([2.0] * (LEAST_ROUNDS - 1), [1.0] * (LEAST_ROUNDS - 1))
    assert few == (2.0, None, None) and not few.differs and few.interval is None and str(few) == "2.00"


@pytest.mark.parametrize("rounds", range(LEAST_ROUNDS, 16))
def test_no_median_lies_outside_its_interval(rounds):
    draw = np.random.default_rng(rounds)
    for _ in range(20):
        found = ratio(draw.lognormal(size=rounds), draw.lognormal(size=rounds))
        assert found.low <= found.median <= found.high


def test_a_difference_is_paired_too():
    drift = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert difference([d + 0.5 for d in drift], drift) == Median(0.5, 0.5, 0.5)


@pytest.mark.parametrize("found", [Ratio(0.9, 0.8, 0.95), Ratio(0.9)])
def test_a_row_of_json_holds_a_ratio(found):
    row = json.loads(json.dumps(to_row("fraction_of_bound", found)))
    assert row["fraction_interval"] == found.interval and from_row(row, "fraction_of_bound") == found


@pytest.mark.parametrize(
    ("found", "reaches"),
    [(Ratio(0.9, 0.8, 0.99), 0), (Ratio(0.9, 0.8, 1.0), 1), (Ratio(1.1, 1.01, 1.2), 1), (Ratio(1.1), 0)],
)
def test_a_fraction_reaches_1_where_no_shortfall_can_be_reported(found, reaches):
    assert found.reaches_1 == reaches


@pytest.mark.parametrize(("low", "high", "differs"), [(0.9, 0.99, True), (0.9, 1.0, False), (1.01, 1.2, True)])
def test_a_difference_is_reported_only_where_the_interval_leaves_1_out(low, high, differs):
    assert Ratio((low + high) / 2, low, high).differs == differs


def test_equals_are_rarely_reported_as_different():
    draw = np.random.default_rng(0)
    pairs = [np.exp(0.03 * draw.standard_normal((2, 9))) for _ in range(300)]
    assert sum(ratio(*pair).differs for pair in pairs) / len(pairs) <= 0.08
