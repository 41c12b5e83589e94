"""The timeline of a pipeline: one lane per rank, operations numbered by microbatch, idle time hatched."""

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpdemo.errors import UserError
from mpdemo.notebook.plots.style import IDLE, INK, OPERATIONS, PURPLE, STYLE, bundle, group_operations
from mpdemo.timeline import read

NARROWEST = 0.012  # share of the picture's width that a box needs to carry a number
MOST_NUMBERED = 16  # ranks; more lanes are too low for a text in each
MOST_OUTLINED = 150  # operations per rank; the outlines of more hide their colours


def timeline(measured=None, ideal=None, *, unit="s", width=8.0):
    """Draw what every rank did when, the ideal schedule beneath it, and the idle share of both.

    Parameters
    ----------
    measured : list of dict, optional
        Rows of one step, from `mpdemo.timeline.read.load`.
    ideal : mpdemo.plan.Simulation, optional
        The same pipeline simulated, drawn beneath on the same time axis. Either one may be left out.
    unit : str
        Unit of the times; times below one second are drawn in milliseconds.
    width : float
        Inches.

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
    return bundle(figure(panels, unit, width), _describe(panels))


def figure(panels, unit="s", width=8.0):
    """Return the matplotlib figure: one panel for each (title, rows), all on one time axis."""
    longest = max(read.step_time(rows) for _, rows in panels)
    scale, unit = (1e3, "ms") if unit == "s" and longest < 1 else (1.0, unit)
    ranks = [1 + max(row["rank"] for row in rows) for _, rows in panels]
    lane_height = 0.34 if max(ranks) <= 8 else max(0.06, 2.7 / max(ranks))  # inches
    with rc_context(STYLE):
        height = 1.15 + sum(0.45 + lane_height * count for count in ranks)
        sheet = Figure(figsize=(width, height), layout="constrained")
        all_axes = sheet.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
        for axes, (title, rows), count in zip(all_axes, panels, ranks, strict=True):
            _paint(axes, rows, count, longest, scale)
            idle, step = read.idle_share(rows), read.step_time(rows)
            axes.set_title(f"{title}: step {step * scale:.3g} {unit}, idle {idle:.0%}", loc="left", fontsize=10)
        all_axes[-1].set_xlabel(f"time ({unit})")
        kinds = {row["kind"] for _, rows in panels for row in rows}
        drawn = [style for kind, style in OPERATIONS.items() if kind in kinds]
        handles = [Patch(facecolor=colour, label=name) for name, colour in drawn] + [Patch(**IDLE, label="idle")]
        sheet.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return sheet


def _paint(axes, rows, ranks, longest, scale):
    """Fill one panel: hatched lanes, boxes on them, numbers where they fit, a tick where a result was sent."""
    for rank in range(ranks):
        lane = [row for row in rows if row["rank"] == rank and row["kind"] in OPERATIONS]
        place = (rank - 0.4, 0.8)
        axes.broken_barh([(0, longest * scale)], place, **IDLE, linewidth=0)
        for colour, group in group_operations(lane, ranks):
            spans = [(row["start"] * scale, (row["end"] - row["start"]) * scale) for row in group]
            line = 0.5 if len(lane) < MOST_OUTLINED else 0
            axes.broken_barh(spans, place, facecolor=colour, edgecolor=INK, linewidth=line)
        for row in lane:
            if row["end"] - row["start"] > NARROWEST * longest and ranks <= MOST_NUMBERED:
                middle = (row["start"] + row["end"]) / 2 * scale
                axes.text(middle, rank, str(row["microbatch"]), ha="center", va="center", fontsize=7, clip_on=True)
    sends = [row for row in rows if row["kind"] == "send"]
    axes.plot([row["start"] * scale for row in sends], [row["rank"] + 0.4 for row in sends], "|", color=PURPLE, ms=4)
    axes.set(xlim=(0, longest * scale), ylim=(ranks - 0.5, -0.5))
    ticks = range(0, ranks, 1 if ranks <= MOST_NUMBERED else ranks // 8)
    axes.set_yticks(ticks, [f"rank {rank}" for rank in ticks])
    axes.grid(visible=False)


def _describe(panels):
    """Return one line that describes the picture, without measured numbers."""
    rows = panels[0][1]
    ranks, microbatches, stages = (1 + max(row[column] for row in rows) for column in ("rank", "microbatch", "stage"))
    each = f", {stages // ranks} stages each" if stages > ranks else ""
    plural = "es" if microbatches > 1 else ""
    titles = " above ".join(title for title, _ in panels)
    return f"timeline of {ranks} ranks{each}, {microbatches} microbatch{plural}: {titles}"
