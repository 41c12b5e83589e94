"""Timelines of pipelines: one lane per rank, operations numbered by microbatch, idle time hatched; memory below."""

from collections import namedtuple

from matplotlib.ticker import MaxNLocator

from mpdemo.errors import UserError
from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.style import EDGE, line_style, paler, patches, picture
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
MOST_NUMBERED = 16  # ranks; more lanes are too low for a text in each
MOST_OUTLINED = 150  # operations per rank; the outlines of more hide their colours
HELD = 0.95  # inches: the curves of memory under a timeline


# longest: of all steps, in the unit of their rows; factor: from that unit to the axis's
TimeScale = namedtuple("TimeScale", "longest factor unit")


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
    """
    panels = {} if measured is None else {"measured": measured}
    if ideal is not None:
        panels["ideal" if panels else "simulated"] = ideal.events
    result = timelines(panels, memory=False, unit=unit)
    rows = next(iter(panels.values()))
    ranks, microbatches, stages = (1 + max(row[column] for row in rows) for column in ("rank", "microbatch", "stage"))
    each = f", {stages // ranks} stages each" if stages > ranks else ""
    parts = f"{microbatches} microbatch{'es' if microbatches > 1 else ''}"
    result.data["text/plain"] = f"timeline of {ranks} ranks{each}, {parts}: {' above '.join(panels)}"
    return result


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
    """
    steps = {title: getattr(step, "events", step) for title, step in panels.items()}
    if not steps or not all(steps.values()):
        raise UserError("no operations to draw; give recorded steps, simulations, or both")
    held = {title: activations_held(rows) for title, rows in steps.items()} if memory else {}
    text = ", ".join(title + (_most_held(held[title]) if memory else "") for title in steps)
    return _drawn(steps, unit, f"timelines of {text}", held)


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


def _most_held(lanes) -> str:
    most = max(count for lane in lanes for _, count in lane)
    return f" (a rank holds at most {most:g} microbatch{'es' if most != 1 else ''})"


def ranks_of(rows) -> int:
    """Return how many ranks a step has."""
    return 1 + max(row["rank"] for row in rows)


def _drawn(steps, unit, text, held=None):
    """Draw a panel for each step (title -> rows) on one time axis, and what is held below."""
    longest = max(row["end"] for rows in steps.values() for row in rows)
    scale = TimeScale(longest, 1e3, "ms") if unit == "s" and longest < 1 else TimeScale(longest, 1.0, unit)
    most = max(map(ranks_of, steps.values()))
    lane = 0.34 if most <= 8 else max(0.06, 2.7 / most)  # inches
    highest = max((count for lanes in (held or {}).values() for points in lanes for _, count in points), default=0)
    heights = [height for rows in steps.values() for height in [lane * ranks_of(rows)] + [HELD] * bool(held)]

    def paint(sheet, grid):
        axes, handles = iter(grid[:, 0]), legend_handles(steps.values())
        for number, (title, rows) in enumerate(steps.items()):
            paint_step(next(axes), _heading(title, rows, scale), rows, scale)
            if held:
                curves = _paint_held(next(axes), held[title], highest, scale)
                handles += curves if number == len(steps) - 1 else []
        grid[-1, 0].set_xlabel(f"time ({scale.unit})")
        sheet.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=9)

    height, words = 1.1 + sum(heights) + 0.42 * len(heights), {"sharex": True, "squeeze": False}
    return picture(paint, text, None, 8.0, height, len(heights), height_ratios=heights, **words)


def _heading(title, rows, scale) -> str:
    """Return a panel's title, with the step's time and idle share."""
    step, idle = read.step_time(rows) * scale.factor, read.idle_share(rows)
    what = "step without the optimizer" if any(row["kind"] == "O" for row in rows) else "step"
    return f"{title}: {what} {step:.3g} {scale.unit}, idle {idle:.0%}"


def legend_handles(steps, **look):
    """Return the legend's patches: the kinds of operations that occur, in some `look`, and idle time."""
    kinds = {row["kind"] for rows in steps for row in rows}
    drawn = [(name, {"facecolor": colour}) for kind, (name, colour) in (OPERATIONS | MESSAGES).items() if kind in kinds]
    return patches(drawn, **look) + patches([("idle", IDLE)])


def paint_step(axes, title, rows, scale, lane="rank"):
    """Fill one panel: a hatched lane for each rank, its operations as numbered boxes, the messages of all as low bars.

    With P ranks, stage P and all above are later stages of a rank: these are paler.
    """
    ranks, ended = ranks_of(rows), max(row["end"] for row in rows)
    many = len(rows) / ranks > MOST_OUTLINED
    for rank in range(ranks):
        axes.broken_barh([(0, ended * scale.factor)], (rank - 0.4, 0.8), **IDLE, linewidth=0)
        own = [row for row in rows if row["rank"] == rank]
        for kind, (_, colour) in (OPERATIONS | MESSAGES).items():
            place = (rank - 0.4, 0.8) if kind in OPERATIONS else (rank + 0.19, 0.21)
            for shade, later in ((colour, False), (paler(colour), True)):
                boxes = [row for row in own if row["kind"] == kind and (row["stage"] >= ranks) is later]
                spans = [(row["start"] * scale.factor, (row["end"] - row["start"]) * scale.factor) for row in boxes]
                axes.broken_barh(spans, place, facecolor=shade, **EDGE | ({"linewidth": 0} if many else {}))
    _write_numbers(axes, rows, scale)
    axes.set(xlim=(0, scale.longest * scale.factor), ylim=(ranks - 0.5, -0.5))
    ticks = range(0, ranks, 1 if ranks <= MOST_NUMBERED else ranks // 8)
    axes.set_yticks(ticks, [f"{lane} {rank}" for rank in ticks])
    axes.grid(visible=False)
    axes.set_title(title, loc="left", fontsize=10)


def _write_numbers(axes, rows, scale):
    """Write each operation's microbatch on its box, or its name where the batch is whole, if there is room for it."""
    numbered = any(row["microbatch"] for row in rows)
    for row in rows if ranks_of(rows) <= MOST_NUMBERED else ():
        wide = NARROWEST if numbered else WIDE
        if row["kind"] in OPERATIONS and row["end"] - row["start"] > wide * scale.longest:
            middle = (row["start"] + row["end"]) / 2 * scale.factor
            text = str(row["microbatch"]) if numbered else OPERATIONS[row["kind"]][0]
            axes.text(middle, row["rank"] - 0.05, text, ha="center", va="center", fontsize=7, clip_on=True)


def _paint_held(axes, lanes, highest, scale):
    """Draw the microbatches that each rank holds, as steps; return the curves."""
    for rank, points in enumerate(lanes):
        times, counts = zip(*points, (scale.longest, points[-1][1]), strict=True)
        look = {"where": "post", "label": f"held by rank {rank}", "linewidth": 1.6} | line_style(rank)
        axes.step([time * scale.factor for time in times], counts, **look)
    axes.set(ylim=(0, highest * 1.12), ylabel="held")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    return axes.get_legend_handles_labels()[0]
