"""Timelines of steps: one lane per rank, operations numbered by microbatch, idle time hatched."""

from collections.abc import Mapping
from typing import Any

from mpdemo.errors import UserError
from mpdemo.measure.timeline import idle_share, step_time
from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.style import EDGE, paler, patches, picture
from mpdemo.notebook.show import Bundle

OPERATIONS = {  # kind: name in the legend, colour
    "F": ("forward", paler(style.SKY, 0.85)),
    "B": ("backward", paler(style.GREEN, 0.85)),
    "I": ("backward, input", paler(style.GREEN, 0.6)),
    "W": ("backward, weights", paler(style.ORANGE, 0.85)),
    "O": ("optimizer", paler(style.PURPLE, 0.85)),
}
MESSAGES = {
    "A": ("all-reduce", paler(style.VERMILLION, 0.7)),
    "G": ("all-gather", style.YELLOW),
    "R": ("reduce-scatter", paler(style.BLUE, 0.8)),
}
IDLE = {"facecolor": style.PAPER, "edgecolor": style.FAINT, "hatch": "////"}
NARROWEST, WIDE, WIDEST = 0.012, 0.09, 0.22  # of the width: what a box needs for a number, a name, a note
MOST_OUTLINED = 150  # operations per rank; the outlines of more hide their colours


def timelines(panels: Mapping[str, Any], *, unit: str = "units") -> Bundle:
    """Draw simulated or recorded steps below each other.

    Parameters
    ----------
    panels : dict
        Title -> `mpdemo.predict.Simulation`, or rows as `mpdemo.measure.timeline` describes them.
    unit : str
        Unit of the times; those below one second are drawn in milliseconds.

    Raises
    ------
    UserError
        No panel, or one without operations.
    """
    steps = {title: getattr(step, "events", step) for title, step in panels.items()}
    if not steps or not all(steps.values()):
        raise UserError("no operations to draw; give recorded steps, simulations, or both")
    if unit == "s" and _end(steps.values()) < 1:
        steps, unit = {title: in_milliseconds(rows) for title, rows in steps.items()}, "ms"
    longest = _end(steps.values())
    lane = min(0.34, 2.7 / max(map(ranks_of, steps.values())))  # inches
    heights = [lane * ranks_of(rows) for rows in steps.values()]

    def paint(sheet, grid):
        for axes, (title, rows) in zip(grid[:, 0], steps.items(), strict=True):
            paint_step(axes, _heading(title, rows, unit), rows, longest)
        axes.set_xlabel(f"time ({unit})")
        handles = legend_handles(steps.values())
        sheet.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=9)

    words = {"sharex": True, "squeeze": False, "height_ratios": heights}
    height = 1.1 + sum(heights) + 0.42 * len(heights)
    return picture(paint, f"timelines of {', '.join(steps)}", None, 8.0, height, len(heights), **words)


def ranks_of(rows) -> int:
    """Return how many ranks a step has."""
    return 1 + max(row["rank"] for row in rows)


def in_milliseconds(rows) -> list[dict]:
    """Return the rows of a step that was recorded in seconds, their times in milliseconds."""
    return [row | {"start": row["start"] * 1e3, "end": row["end"] * 1e3} for row in rows]


def _end(steps) -> float:
    return max(row["end"] for rows in steps for row in rows)


def _heading(title, rows, unit) -> str:
    """Return a panel's title, with the step's time and idle share."""
    what = "step without the optimizer" if any(row["kind"] == "O" for row in rows) else "step"
    return f"{title}: {what} {step_time(rows):.3g} {unit}, idle {idle_share(rows):.0%}"


def legend_handles(steps, **look):
    """Return the legend's patches: the kinds of operations that occur, in some `look`, and idle time."""
    kinds = {row["kind"] for rows in steps for row in rows}
    drawn = [(name, {"facecolor": colour}) for kind, (name, colour) in (OPERATIONS | MESSAGES).items() if kind in kinds]
    return patches(drawn, **look) + patches([("idle", IDLE)])


def paint_step(axes, title, rows, longest, lane="rank", note=None):
    """Fill one panel: a hatched lane for each rank, its operations as numbered boxes, the messages of all as low bars.

    With P ranks, stage P and all above are later stages of a rank: these are paler. A note stands below each name.
    """
    ranks, end = ranks_of(rows), _end([rows])
    edge = EDGE | ({"linewidth": 0} if len(rows) / ranks > MOST_OUTLINED else {})
    for rank in range(ranks):
        axes.broken_barh([(0, end)], (rank - 0.4, 0.8), **IDLE, linewidth=0)
        own = [row for row in rows if row["rank"] == rank]
        for kind, (_, colour) in (OPERATIONS | MESSAGES).items():
            place = (rank - 0.4, 0.8) if kind in OPERATIONS else (rank + 0.19, 0.21)
            for shade, later in ((colour, False), (paler(colour), True)):
                boxes = [row for row in own if row["kind"] == kind and (row["stage"] >= ranks) is later]
                spans = [(row["start"], row["end"] - row["start"]) for row in boxes]
                axes.broken_barh(spans, place, facecolor=shade, **edge)
    _write_numbers(axes, rows, longest, note)
    axes.set(xlim=(0, longest), ylim=(ranks - 0.5, -0.5))
    axes.set_yticks(range(ranks), [f"{lane} {rank}" for rank in range(ranks)])
    axes.grid(visible=False)
    axes.set_title(title, loc="left", fontsize=10)


def _write_numbers(axes, rows, longest, note):
    """Write each operation's microbatch on its box, or its name and the note, if there is room for it."""
    numbered = any(row["microbatch"] for row in rows)
    for row in rows:
        width = (row["end"] - row["start"]) / longest
        if row["kind"] in OPERATIONS and width > (NARROWEST if numbered else WIDE):
            text = str(row["microbatch"]) if numbered else OPERATIONS[row["kind"]][0]
            text += f"\n{note}" if note and width > WIDEST else ""
            place = (row["start"] + row["end"]) / 2, row["rank"] - 0.05
            axes.text(*place, text, ha="center", va="center", fontsize=7, clip_on=True)
