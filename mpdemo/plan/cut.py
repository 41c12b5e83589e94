"""Where to cut: the slowest stage sets the pace, so make it as fast as possible."""

from mpdemo.errors import UserError


def balanced_cut(costs, stages, fits=None):
    """Cut a chain of blocks so that the most expensive stage is as cheap as possible.

    Dynamic programming over "the first j blocks in s stages": n blocks and k stages take n * n * k steps. Among the
    cuts with the same slowest stage, the one with the most even stages (least sum of squares) is taken.

    Parameters
    ----------
    costs : sequence of float
        Of each block, in order.
    stages : int
        How many stages, none of them empty.
    fits : callable, optional
        ``fits(start, stop, stage)``: whether blocks `start` to `stop` (excluded) may be stage number `stage`.

    Returns
    -------
    list of int or None
        The first block of every stage but the first; None where no cut fits.

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
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
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
                if value < row[stop] and (fits is None or fits(start, stop, stage)):
                    row[stop], cuts[stop] = value, start
        best = row
        choice.append(cuts)
    if best[count] == nothing:
        return None
    points, stop = [], count
    for cuts in reversed(choice):
        stop = cuts[stop]
        points.append(stop)
    return points[::-1][1:]


def improve(points, count, score):
    """Move single borders by one block as long as that lowers the score; return the best cut and its score.

    Parameters
    ----------
    points : list of int
        A cut.
    count : int
        Blocks of the model.
    score : callable
        ``score(points)``, lower is better.
    """
    best = score(points)
    moved = True
    while moved:
        moved = False
        for border in range(len(points)):
            for by in (-1, 1):
                other = move_border(points, border, by, count)
                if other is None:
                    continue
                value = score(other)
                if value < best:
                    points, best, moved = other, value, True
    return points, best


def move_border(points, border, by, count):
    """Return the cut of `count` blocks with one border moved `by` blocks; None where a stage would be empty."""
    moved = [*points]
    moved[border] += by
    edges = [0, *moved, count]
    return moved if all(a < b for a, b in zip(edges, edges[1:], strict=False)) else None
