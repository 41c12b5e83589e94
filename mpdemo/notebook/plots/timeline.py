"""Timelines of steps: one lane per rank, operations numbered by microbatch, what is waited for hatched."""

from collections.abc import Mapping
from typing import Any

from mpdemo.errors import UserError
from mpdemo.measure.timeline import idle_share, step_time, waiting
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
    "E": ("other collective", style.FAINT),
    "S": ("message", paler(style.BLACK, 0.75)),
}
WAITING = {  # in a step that the profiler recorded; of others, only all time without computing is known
    "exposed": (
        "exposed communication",
        {"facecolor": style.PAPER, "edgecolor": style.ORANGE, "hatch": "\\\\\\\\"},
    ),
    "waits": ("waits for a rank", {"facecolor": style.PAPER, "edgecolor": style.FAINT, "hatch": "////"}),
}
IDLE = {"facecolor": style.PAPER, "edgecolor": style.FAINT, "hatch": "////"}
NARROWEST, WIDE = 0.012, 0.09  # of the width: what a box needs for a number, a name
MOST_OUTLINED = 150  # operations per rank; the outlines of more hide their colours


def timelines(panels: Mapping[str, Any], *, unit: str = "units") -> Bundle:
    """Draw simulated or recorded steps below each other.

    Parameters
    ----------
    panels : dict
        Title -> `mpdemo.predict.Simulation`, or rows as `mpdemo.measure.timeline` or `mpdemo.measure.spans` has them.
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
    told = "; ".join(_heading(title, rows, unit) for title, rows in steps.items())
    return picture(paint, f"timelines of {', '.join(steps)}", told, 8.0, height, len(heights), **words)


def ranks_of(rows) -> int:
    """Return how many ranks a step has."""
    return 1 + max(row["rank"] for row in rows)


def in_milliseconds(rows, scale=1.0) -> list[dict]:
    """Return the rows of a step that was recorded in seconds, their times in milliseconds, longer by a factor."""
    times = "start", "posted", "moves", "end"
    return [row | {key: row[key] * 1e3 * scale for key in times if key in row} for row in rows]


def is_profiled(rows) -> bool:
    """Whether the rows of a step tell what is waited for."""
    return "lane" in rows[0]


def _end(steps) -> float:
    return max(row["end"] for rows in steps for row in rows)


def _heading(title, rows, unit) -> str:
    """Return a panel's title, with the step's time and idle share."""
    what = "step without the optimizer" if any(row["kind"] == "O" for row in rows) else "step"
    return f"{title}: {what} {step_time(rows):.3g} {unit}, idle {idle_share(rows):.0%}"


def legend_handles(steps, **look):
    """Return the legend's patches: the kinds of operations that occur, in some `look`, and of waiting."""
    steps = list(steps)
    kinds = {row["kind"] for rows in steps for row in rows}
    drawn = [
        (name, {"facecolor": colour})
        for kind, (name, colour) in (OPERATIONS | MESSAGES).items()
        if kind in kinds
    ]
    found = {row["kind"] for rows in steps if is_profiled(rows) for row in waiting(rows)}
    hatched = [words for kind, words in WAITING.items() if kind in found]
    hatched += [("idle", IDLE)] * (not all(map(is_profiled, steps)))
    return patches(drawn, **look) + patches(hatched)


def paint_step(axes, title, rows, longest, lane="rank"):
    """Fill one panel: a lane for each rank, its operations as numbered boxes, messages as low bars, waiting hatched.

    With P ranks, stage P and all above are later stages of a rank: these are paler.
    """
    ranks, end = ranks_of(rows), _end([rows])
    edge = EDGE | ({"linewidth": 0} if len(rows) / ranks > MOST_OUTLINED else {})
    waits = waiting(rows) if is_profiled(rows) else []
    for rank in range(ranks):
        place, own = (rank - 0.4, 0.8), [row for row in rows if row["rank"] == rank]
        if not is_profiled(rows):
            axes.broken_barh([(0, end)], place, **IDLE, linewidth=0)
        for kind, (_, look) in WAITING.items():
            spans = [_span(row) for row in waits if row["rank"] == rank and row["kind"] == kind]
            axes.broken_barh(spans, place, **look, linewidth=0)
        for kind, (_, colour) in (OPERATIONS | MESSAGES).items():
            low = place if kind in OPERATIONS else (rank + 0.19, 0.21)
            for shade, later in ((colour, False), (paler(colour), True)):
                boxes = [
                    row for row in own if row["kind"] == kind and (row.get("stage", 0) >= ranks) is later
                ]
                axes.broken_barh(list(map(_span, boxes)), low, facecolor=shade, **edge)
    _write_numbers(axes, rows, longest)
    axes.set(xlim=(0, longest), ylim=(ranks - 0.5, -0.5))
    axes.set_yticks(range(ranks), [f"{lane} {rank}" for rank in range(ranks)])
    axes.grid(visible=False)
    axes.set_title(title, loc="left", fontsize=10)


def _span(row) -> tuple[float, float]:
    """Return the start and the length of a row's box; a message's begins when its bytes move."""
    start = row.get("moves", row["start"])
    return start, row["end"] - start


def _write_numbers(axes, rows, longest):
    """Write each operation's microbatch on its box, or its name, if there is room for it."""
    numbered = any(row.get("microbatch") for row in rows)
    for row in rows:
        width = (row["end"] - row["start"]) / longest
        if row["kind"] in OPERATIONS and width > (NARROWEST if numbered else WIDE):
            text = str(row.get("microbatch", "")) if numbered else OPERATIONS[row["kind"]][0]
            place = (row["start"] + row["end"]) / 2, row["rank"] - 0.05
            axes.text(*place, text, ha="center", va="center", fontsize=7, clip_on=True)
