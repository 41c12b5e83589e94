"""Where to cut: the slowest stage sets the pace, so make it as fast as possible."""

from itertools import accumulate, pairwise, product

from mpdemo.errors import UserError


def balanced_cut(costs, stages):
    """Cut a chain of blocks so that the most expensive stage is as cheap as possible.

    Dynamic programming over "the first j blocks in s stages": n blocks and k stages take n * n * k steps. Among the
    cuts with the same slowest stage, the one with the most even stages (least sum of squares) is taken.

    Parameters
    ----------
    costs : sequence of float
        Of each block, in order.
    stages : int
        How many stages, none of them empty.

    Returns
    -------
    list of int
        The first block of every stage but the first.

    Raises
    ------
    UserError
        More stages than blocks.

    Examples
    --------
    >>> balanced_cut([3, 1, 1, 1, 2, 2], stages=2)
    [3]
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise UserError(f"{stages} stages of a model of {count} blocks; allowed: 1 to {count}")
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


def improve(points, count, score):
    """Move one or several neighbouring boundaries by one block as long as that lowers the score."""
    best = score(points)
    runs = [(first, n) for first in range(len(points)) for n in range(1, len(points) - first + 1)]
    improved = True
    while improved:
        improved = False
        for (first, n), by in product(runs, (-1, 1)):
            moved = move_boundary(points, first, by, count, neighbours=n)
            value = best if moved is None else score(moved)
            if value < best:
                points, best, improved = moved, value, True
    return points, best


def move_boundary(points, boundary, by, count, neighbours=1):
    """Return the cut of `count` blocks with a stage boundary moved `by` blocks; None where a stage would be empty.

    `neighbours` boundaries move together, from number `boundary` on.
    """
    moved = [p + by if boundary <= i < boundary + neighbours else p for i, p in enumerate(points)]
    return moved if all(start < stop for start, stop in stage_slices(moved, count)) else None


def stage_slices(points, count):
    """Return (start, stop) of every stage."""
    return list(pairwise([0, *points, count]))
