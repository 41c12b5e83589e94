"""Timelines below each other on one time axis; under each, how many activations every rank holds, over time."""

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpdemo.errors import UserError
from mpdemo.notebook.plots.style import STYLE, bundle, line_style
from mpdemo.notebook.plots.timeline import legend_handles, paint_step, time_scale

LANE, HELD = 0.34, 0.95  # inches: of a rank's lane, of the curves of memory under a timeline


def timelines(panels, *, memory=True, unit="units"):
    """Draw simulated or recorded steps below each other, with the memory over time under each.

    Parameters
    ----------
    panels : dict
        Title -> `mpdemo.plan.Simulation`, or rows as `mpdemo.timeline.read` describes them.
    memory : bool
        Whether to draw the activations that every rank holds, in microbatches.
    unit : str
        Unit of the times.

    Returns
    -------
    Bundle
        The picture; a line that names the panels, with the most that a rank of each holds
        where the memory is drawn.

    Raises
    ------
    UserError
        There is nothing to draw.
    """
    steps = {title: getattr(step, "events", step) for title, step in panels.items()}
    if not steps or not all(steps.values()):
        raise UserError("no operations to draw; give timelines() a dictionary of simulations or recorded steps")
    lanes_of = {title: activations_held(rows) for title, rows in steps.items()}
    text = ", ".join(title + (_most_held(lanes) if memory else "") for title, lanes in lanes_of.items())
    return bundle(_figure(steps, lanes_of if memory else None, unit), f"timelines of {text}")


def activations_held(rows) -> list[list[tuple[float, float]]]:
    """Return for every rank the points (time, microbatches whose activations it holds), one at each change.

    A forward pass keeps activations, the backward pass frees them (W, where it is split). A stage is a part of its
    rank: with two stages per rank, a microbatch on one of them counts a half.
    """
    ranks = 1 + max(row["rank"] for row in rows)
    frees = "W" if any(row["kind"] == "W" for row in rows) else "B"
    lanes = []
    for rank in range(ranks):
        own = [row for row in rows if row["rank"] == rank and row["kind"] in ("F", frees)]
        stages = len({row["stage"] for row in own})
        changes = [(row["start"], 1) if row["kind"] == "F" else (row["end"], -1) for row in own]
        count, points = 0, [(0.0, 0.0)]
        for time, change in sorted(changes):  # at the same time, what is freed counts first
            count += change
            points.append((time, count / stages))
        lanes.append(points)
    return lanes


def _most_held(lanes) -> str:
    most = max(count for lane in lanes for _, count in lane)
    return f" (a rank holds at most {most:g} microbatch{'es' if most != 1 else ''})"


def _figure(steps, lanes_of, unit):
    """Return the figure: a panel of lanes for each step and, where memory is drawn, one of curves under it."""
    scale = time_scale(steps.values(), unit)
    ranks = {title: 1 + max(row["rank"] for row in rows) for title, rows in steps.items()}
    heights = [height for count in ranks.values() for height in ([LANE * count, HELD] if lanes_of else [LANE * count])]
    with rc_context(STYLE):
        sheet = Figure(figsize=(8.0, 1.1 + sum(heights) + 0.4 * len(heights)), layout="constrained")
        axes = iter(sheet.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
        highest = lanes_of and max(count for lanes in lanes_of.values() for lane in lanes for _, count in lane)
        for title, rows in steps.items():
            upper = next(axes)
            paint_step(upper, title, rows, ranks[title], scale)
            if lanes_of:
                last = next(axes)
                _paint_held(last, lanes_of[title], highest, scale)
        (last if lanes_of else upper).set_xlabel(f"time ({scale.unit})")
        handles = legend_handles(steps.values())
        handles += last.get_legend_handles_labels()[0] if lanes_of else []
        sheet.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=9)
    return sheet


def _paint_held(axes, lanes, highest, scale):
    """Draw the microbatches that each rank holds, as steps."""
    for rank, points in enumerate(lanes):
        times, counts = zip(*points, (scale.longest, points[-1][1]), strict=True)
        style = {**line_style(rank), "linewidth": 1.6}
        axes.step([time * scale.factor for time in times], counts, where="post", label=f"held by rank {rank}", **style)
    axes.set(ylim=(0, highest * 1.12), ylabel="held")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
