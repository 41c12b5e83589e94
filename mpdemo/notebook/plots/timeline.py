"""Timelines of steps: one lane per rank, operations numbered by microbatch, idle time hatched; memory below."""

from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import MaxNLocator

from mpdemo.errors import UserError
from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.style import EDGE, line_style, paler, patches, picture
from mpdemo.notebook.show import Bundle
from mpdemo.timeline import read

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
NARROWEST, WIDE = 0.012, 0.09  # share of the picture's width that a box needs to carry a number, a name
MOST_OUTLINED = 150  # operations per rank; the outlines of more hide their colours
HELD = 0.95  # inches: the curves of memory under a timeline


def timelines(panels: Mapping[str, Any], *, memory: bool = True, unit: str = "units") -> Bundle:
    """Draw simulated or recorded steps below each other, with the memory over time under each.

    Parameters
    ----------
    panels : dict
        Title -> `mpdemo.plan.Simulation`, or rows as `mpdemo.timeline.read` describes them.
    memory : bool
        Whether to draw the activations that every rank holds, in microbatches.
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
    longest, most = _end(steps.values()), max(map(ranks_of, steps.values()))
    held = {title: activations_held(rows) for title, rows in steps.items()} if memory else {}
    highest = max((_most(lanes) for lanes in held.values()), default=0)
    lane = 0.34 if most <= 8 else 2.7 / most  # inches
    heights = [height for rows in steps.values() for height in [lane * ranks_of(rows)] + [HELD] * memory]

    def paint(sheet, grid):
        axes, handles = iter(grid[:, 0]), legend_handles(steps.values())
        for title, rows in steps.items():
            paint_step(next(axes), _heading(title, rows, unit), rows, longest)
            if memory:
                curves = _paint_held(next(axes), held[title], highest, longest)
        grid[-1, 0].set_xlabel(f"time ({unit})")
        handles += curves if memory else []
        sheet.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=9)

    named = [title + (_held_text(held[title]) if memory else "") for title in steps]
    words = {"sharex": True, "squeeze": False, "height_ratios": heights}
    height = 1.1 + sum(heights) + 0.42 * len(heights)
    return picture(paint, f"timelines of {', '.join(named)}", None, 8.0, height, len(heights), **words)


def activations_held(rows) -> list[list[tuple[float, float]]]:
    """Return for every rank the points (time, microbatches whose activations it holds), one at each change.

    A forward pass keeps activations, the backward pass frees them (W, where it is split). A stage is a part of its
    rank: with two stages per rank, a microbatch on one of them counts a half.
    """
    frees = "W" if any(row["kind"] == "W" for row in rows) else "B"
    lanes = []
    for rank in range(ranks_of(rows)):
        own = [row for row in rows if row["rank"] == rank and row["kind"] in ("F", frees)]
        stages = len({row["stage"] for row in own})
        changes = [(row["start"], 1) if row["kind"] == "F" else (row["end"], -1) for row in own]
        count, points = 0, [(0.0, 0.0)]
        for time, change in sorted(changes):  # at the same time, what is freed counts first
            count += change
            points.append((time, count / stages))
        lanes.append(points)
    return lanes


def _most(lanes) -> float:
    return max(count for lane in lanes for _, count in lane)


def _held_text(lanes) -> str:
    return f" (a rank holds at most {_most(lanes):g} microbatch{'es' if _most(lanes) != 1 else ''})"


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
    return f"{title}: {what} {read.step_time(rows):.3g} {unit}, idle {read.idle_share(rows):.0%}"


def legend_handles(steps, **look):
    """Return the legend's patches: the kinds of operations that occur, in some `look`, and idle time."""
    kinds = {row["kind"] for rows in steps for row in rows}
    drawn = [(name, {"facecolor": colour}) for kind, (name, colour) in (OPERATIONS | MESSAGES).items() if kind in kinds]
    return patches(drawn, **look) + patches([("idle", IDLE)])


def paint_step(axes, title, rows, longest, lane="rank"):
    """Fill one panel: a hatched lane for each rank, its operations as numbered boxes, the messages of all as low bars.

    With P ranks, stage P and all above are later stages of a rank: these are paler.
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
    _write_numbers(axes, rows, longest)
    axes.set(xlim=(0, longest), ylim=(ranks - 0.5, -0.5))
    axes.set_yticks(range(ranks), [f"{lane} {rank}" for rank in range(ranks)])
    axes.grid(visible=False)
    axes.set_title(title, loc="left", fontsize=10)


def _write_numbers(axes, rows, longest):
    """Write each operation's microbatch on its box, or its name where the batch is whole, if there is room for it."""
    numbered = any(row["microbatch"] for row in rows)
    for row in rows:
        wide = NARROWEST if numbered else WIDE
        if row["kind"] in OPERATIONS and row["end"] - row["start"] > wide * longest:
            text = str(row["microbatch"]) if numbered else OPERATIONS[row["kind"]][0]
            place = (row["start"] + row["end"]) / 2, row["rank"] - 0.05
            axes.text(*place, text, ha="center", va="center", fontsize=7, clip_on=True)


def _paint_held(axes, lanes, highest, longest):
    """Draw the microbatches that each rank holds, as steps; return the curves."""
    for rank, points in enumerate(lanes):
        times, counts = zip(*points, (longest, points[-1][1]), strict=True)
        axes.step(times, counts, where="post", label=f"held by rank {rank}", linewidth=1.6, **line_style(rank))
    axes.set(ylim=(0, highest * 1.12), ylabel="held")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    return axes.get_legend_handles_labels()[0]
