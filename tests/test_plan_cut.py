"""The cut is the best there is: compared with all cuts of small models."""

import random
from itertools import combinations

import pytest

from mpdemo.errors import UserError
from mpdemo.plan.cut import balanced_cut, improve


def slowest(costs, points):
    edges = [0, *points, len(costs)]
    return max(sum(costs[a:b]) for a, b in zip(edges, edges[1:], strict=False))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cut_has_a_faster_slowest_stage(seed):
    draw = random.Random(seed)
    costs = [draw.choice([0.1, 1, 2, 5]) * draw.random() for _ in range(draw.randint(2, 9))]
    stages = draw.randint(1, min(4, len(costs)))
    every = [list(points) for points in combinations(range(1, len(costs)), stages - 1)]
    points_chosen = balanced_cut(costs, stages)
    assert points_chosen in every
    assert slowest(costs, points_chosen) == pytest.approx(min(slowest(costs, points) for points in every))


def test_hundreds_of_stages():
    assert balanced_cut([1.0] * 200, 100) == list(range(2, 200, 2))


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(UserError, match="allowed: 1 to 3"):
        balanced_cut([1, 1, 1], 4)


def test_improve_walks_to_the_cut_with_the_lowest_score():
    costs = [1, 1, 1, 5, 1, 1, 1, 1]
    points, score = improve([1], len(costs), lambda points: slowest(costs, points))
    assert (points, score) == ([4], 8)


def test_improve_moves_neighbouring_boundaries_together():
    """Only all three boundaries moved at once lower this score."""
    points, _ = improve([3, 5, 7], 9, lambda points: 0 if points == [4, 6, 8] else 1)
    assert points == [4, 6, 8]
