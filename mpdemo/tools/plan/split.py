"""Where to split a chain of blocks into stages: so that the slowest is as fast as possible."""

from itertools import accumulate, pairwise


def balanced_cut(costs, stages) -> list[int]:
    """Cut a chain of blocks so that the most expensive stage is as cheap as possible: [first block of each but one].

    Dynamic programming over "the first j blocks in s stages": n blocks and k stages take n * n * k steps. Among the
    cuts with the same slowest stage, the one with the most even stages (least sum of squares) is taken.
    """
    count = len(costs)
    total = list(accumulate(costs, initial=0.0))
    nothing = (float("inf"), float("inf"))
    best = [(0.0, 0.0)] + [nothing] * count  # (slowest stage, sum of squares) for the first j blocks
    choice = []
    for stage in range(stages):
        row, cuts = [nothing] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count - (stages - stage - 1) + 1):
            for start in range(stage, stop):
                cost = total[stop] - total[start]
                slowest, squares = best[start]
                value = (max(slowest, cost), squares + cost * cost)
                if value < row[stop]:
                    row[stop], cuts[stop] = value, start
        best = row
        choice.append(cuts)
    points, stop = [], count
    for cuts in reversed(choice):
        stop = cuts[stop]
        points.append(stop)
    return points[::-1][1:]


def stage_slices(points, count):
    """Return (start, stop) of every stage."""
    return list(pairwise([0, *points, count]))
