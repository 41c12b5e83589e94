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
    found = balanced_cut(costs, stages)
    assert found in every
    assert slowest(costs, found) == pytest.approx(min(slowest(costs, points) for points in every))


@pytest.mark.parametrize("seed", range(30))
def test_with_a_memory_limit_it_is_the_best_of_those_that_fit(seed):
    draw = random.Random(seed)
    costs, sizes = ([draw.random() for _ in range(8)] for _ in range(2))
    limits = [draw.uniform(0.8, 3) for _ in range(3)]

    def fits(start, stop, stage):
        return sum(sizes[start:stop]) <= limits[stage]

    def all_fit(points):
        edges = [0, *points, 8]
        return all(fits(a, b, s) for s, (a, b) in enumerate(zip(edges, edges[1:], strict=False)))

    every = [list(points) for points in combinations(range(1, 8), 2) if all_fit(points)]
    found = balanced_cut(costs, 3, fits)
    if not every:
        assert found is None
    else:
        assert found in every
        assert slowest(costs, found) == pytest.approx(min(slowest(costs, points) for points in every))


def test_hundreds_of_stages():
    assert balanced_cut([1.0] * 200, 100) == list(range(2, 200, 2))


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(UserError, match="allowed: 1 to 3"):
        balanced_cut([1, 1, 1], 4)


def test_improve_walks_to_the_cut_with_the_lowest_score():
    costs = [1, 1, 1, 5, 1, 1, 1, 1]
    points, score = improve([1], len(costs), lambda points: slowest(costs, points))
    assert (points, score) == ([4], 8)
