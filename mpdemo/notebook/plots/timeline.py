"""The timeline of a pipeline: one lane per rank, operations numbered by microbatch, idle time hatched."""

from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpdemo.errors import UserError
from mpdemo.notebook.plots.style import IDLE, INK, MESSAGES, OPERATIONS, PURPLE, STYLE, bundle, group_operations
from mpdemo.timeline import read

NARROWEST = 0.012  # share of the picture's width that a box needs to carry a number
MOST_NUMBERED = 16  # ranks; more lanes are too low for a text in each
MOST_OUTLINED = 150  # operations per rank; the outlines of more hide their colours


class TimeScale(NamedTuple):
    """The time axis of a picture."""

    longest: float  # step, in the unit of the rows
    factor: float  # from the unit of the rows to that of the axis
    unit: str


def timeline(measured=None, ideal=None, *, unit="s"):
    """Draw what every rank did when, the ideal schedule beneath it, and the idle share of both.

    Parameters
    ----------
    measured : list of dict, optional
        Rows of one step, from `mpdemo.timeline.read.load`.
    ideal : mpdemo.plan.Simulation, optional
        The same pipeline simulated, drawn beneath on the same time axis. Either one may be left out.
    unit : str
        Unit of the times; times below one second are drawn in milliseconds.

    Returns
    -------
    Bundle
        The picture, and a line without measured numbers.

    Raises
    ------
    UserError
        There is no operation to draw.
    """
    panels = [] if measured is None else [("measured", measured)]
    if ideal is not None:
        panels.append(("ideal" if panels else "simulated", ideal.events))
    if not panels or not all(rows for _, rows in panels):
        raise UserError("no operations to draw; give timeline() a recorded step, a simulation, or both")
    return bundle(figure(panels, unit), _describe(panels))


def figure(panels, unit="s"):
    """Return the matplotlib figure: one panel for each (title, rows), all on one time axis."""
    steps = [rows for _, rows in panels]
    scale = time_scale(steps, unit)
    ranks = [1 + max(row["rank"] for row in rows) for _, rows in panels]
    lane_height = 0.34 if max(ranks) <= 8 else max(0.06, 2.7 / max(ranks))  # inches
    with rc_context(STYLE):
        height = 1.15 + sum(0.45 + lane_height * count for count in ranks)
        sheet = Figure(figsize=(8.0, height), layout="constrained")
        all_axes = sheet.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
        for axes, (title, rows), count in zip(all_axes, panels, ranks, strict=True):
            paint_step(axes, title, rows, count, scale)
        all_axes[-1].set_xlabel(f"time ({scale.unit})")
        handles = legend_handles(steps)
        sheet.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return sheet


def time_scale(steps, unit):
    """Return the time axis that all steps share: the longest step, the factor of its times, and their unit."""
    longest = max(row["end"] for rows in steps for row in rows)
    return TimeScale(longest, 1e3, "ms") if unit == "s" and longest < 1 else TimeScale(longest, 1.0, unit)


def legend_handles(steps, **look):
    """Return the legend's patches: the kinds of operations that occur, in some `look`, and idle time."""
    kinds = {row["kind"] for rows in steps for row in rows}
    drawn = [style for kind, style in {**OPERATIONS, **MESSAGES}.items() if kind in kinds]
    return [Patch(facecolor=colour, label=name, **look) for name, colour in drawn] + [Patch(**IDLE, label="idle")]


def paint_step(axes, title, rows, ranks, scale):
    """Fill one panel, and head it with the step's time and idle share."""
    paint_lanes(axes, rows, ranks, scale.longest, scale.factor)
    step, idle = read.step_time(rows) * scale.factor, read.idle_share(rows)
    what = "step without the optimizer" if any(row["kind"] == "O" for row in rows) else "step"
    axes.set_title(f"{title}: {what} {step:.3g} {scale.unit}, idle {idle:.0%}", loc="left", fontsize=10)


def paint_lanes(axes, rows, ranks, longest, scale):
    """Fill one panel: hatched lanes, boxes on them, numbers where they fit, a tick where a result was sent."""
    ended, numbered = max(row["end"] for row in rows), any(row["microbatch"] for row in rows)
    for rank in range(ranks):
        lane = [row for row in rows if row["rank"] == rank and row["kind"] in OPERATIONS]
        place = (rank - 0.4, 0.8)
        axes.broken_barh([(0, ended * scale)], place, **IDLE, linewidth=0)
        for colour, group in group_operations(lane, ranks):
            spans = [(row["start"] * scale, (row["end"] - row["start"]) * scale) for row in group]
            line = 0.5 if len(lane) < MOST_OUTLINED else 0
            axes.broken_barh(spans, place, facecolor=colour, edgecolor=INK, linewidth=line)
        for row in lane if numbered and ranks <= MOST_NUMBERED else ():
            if row["end"] - row["start"] > NARROWEST * longest:
                middle = (row["start"] + row["end"]) / 2 * scale
                axes.text(middle, rank, str(row["microbatch"]), ha="center", va="center", fontsize=7, clip_on=True)
        paint_messages(axes, [row for row in rows if row["rank"] == rank], rank, scale)
    sends = [row for row in rows if row["kind"] == "send"]
    axes.plot([row["start"] * scale for row in sends], [row["rank"] + 0.4 for row in sends], "|", color=PURPLE, ms=4)
    axes.set(xlim=(0, longest * scale), ylim=(ranks - 0.5, -0.5))
    ticks = range(0, ranks, 1 if ranks <= MOST_NUMBERED else ranks // 8)
    axes.set_yticks(ticks, [f"rank {rank}" for rank in ticks])
    axes.grid(visible=False)


def paint_messages(axes, rows, rank, scale):
    """Draw a low bar for each message in which all ranks take part, among the rows of one rank."""
    for kind, (_, colour) in MESSAGES.items():
        spans = [(row["start"] * scale, (row["end"] - row["start"]) * scale) for row in rows if row["kind"] == kind]
        axes.broken_barh(spans, (rank + 0.19, 0.21), facecolor=colour, edgecolor=INK, linewidth=0.5)


def _describe(panels):
    """Return one line that describes the picture, without measured numbers."""
    rows = panels[0][1]
    ranks, microbatches, stages = (1 + max(row[column] for row in rows) for column in ("rank", "microbatch", "stage"))
    each = f", {stages // ranks} stages each" if stages > ranks else ""
    plural = "es" if microbatches > 1 else ""
    titles = " above ".join(title for title, _ in panels)
    return f"timeline of {ranks} ranks{each}, {microbatches} microbatch{plural}: {titles}"
