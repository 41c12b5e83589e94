"""One training step of each rung on one time axis, and beside it the memory of every device."""

from itertools import zip_longest

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpdemo.notebook.plots.style import (
    BLUE,
    GREEN,
    IDLE,
    INK,
    OPERATIONS,
    ORANGE,
    PAPER,
    SKY,
    STYLE,
    bundle,
    group_operations,
    paler,
)
from mpdemo.notebook.plots.timeline import legend_handles, paint_messages
from mpdemo.notebook.rung_table import MIB, PARTS, memory_text

LANE = 0.36  # inches per device
WIDE = 0.09  # share of the time axis that a box needs to carry its name
COLOURS = (paler(BLUE, 0.9), ""), (paler(GREEN, 0.6), "\\\\\\\\"), (paler(ORANGE, 0.7), "...."), (paler(SKY, 0.6), "")
MEMORY = dict(zip(PARTS, COLOURS, strict=True))  # colour and hatch of each part of a device's memory


def ladder_so_far(rows):
    """Draw the timelines of all rungs below each other, with the peak memory per device to their right.

    Parameters
    ----------
    rows : list of dict
        `rung`, `devices`, `step_seconds`, `speedup`, `bound`, `timeline` (as `mpdemo.timeline.read` describes it;
        `rank` is the device) and `memory` (one dict of bytes for each device), from `mpdemo.labs.story`.

    Returns
    -------
    Bundle
        The picture; a line that is the same whichever rungs have run; and a description with the numbers, as the
        picture's alternative text.
    """
    lanes = [row["devices"] for row in rows]
    longest = max(operation["end"] for row in rows for operation in row["timeline"])
    most = max(sum(device[part] for part in MEMORY) for row in rows for device in row["memory"]) / MIB
    with rc_context(STYLE):
        sheet = Figure(figsize=(8.6, 1.35 + sum(0.42 + LANE * count for count in lanes)), layout="constrained")
        grid = sheet.subplots(
            len(rows),
            2,
            sharex="col",
            squeeze=False,
            height_ratios=[count + 0.4 for count in lanes],
            width_ratios=[3, 1],
        )
        for (time, memory), row in zip(grid, rows, strict=True):
            paint_step(time, row, longest)
            paint_memory(memory, row, most)
        grid[-1, 0].set_xlabel("time since the step began (ms)")
        grid[-1, 1].set_xlabel("peak memory (MiB)")
        add_legend(sheet, rows)
    result = bundle(sheet, "the ladder so far: a step of each rung on one time axis, and the memory of every device")
    result.metadata["image/png"]["alt"] = "; ".join(
        f"{headline(row)}, peak memory (MiB) {memory_text(row['memory'])}" for row in rows
    )
    return result


def paint_step(axes, row, longest):
    """Draw what every device does when; hatched is idle, and a low bar is an all-reduce under way."""
    devices, end = row["devices"], max(operation["end"] for operation in row["timeline"])
    for device in range(devices):
        lane, place = [o for o in row["timeline"] if o["rank"] == device], (device - 0.4, 0.8)
        axes.broken_barh([(0, end * 1e3)], place, **IDLE, linewidth=0)
        for colour, group in group_operations(lane, devices):
            axes.broken_barh([span(o) for o in group], place, facecolor=colour, edgecolor=INK, linewidth=0.5)
        paint_messages(axes, lane, device, scale=1e3)
        for operation in (o for o in lane if o["kind"] in OPERATIONS):
            start, length = span(operation)
            if length > WIDE * longest * 1e3:
                name = OPERATIONS[operation["kind"]][0]
                axes.text(start + length / 2, device - 0.1, name, ha="center", va="center", fontsize=8, clip_on=True)
    axes.set(xlim=(0, longest * 1e3), ylim=(devices - 0.5, -0.5))
    axes.set_yticks(range(devices), [f"device {device}" for device in range(devices)])
    axes.set_title(headline(row), loc="left", fontsize=10)
    axes.grid(visible=False, axis="y")


def paint_memory(axes, row, most):
    """Draw a bar of stacked parts for every device, its total at the end."""
    devices = range(row["devices"])
    left = [0.0] * row["devices"]
    for part, (colour, hatch) in MEMORY.items():
        widths = [device[part] / MIB for device in row["memory"]]
        style = {"color": colour, "hatch": hatch, "edgecolor": INK, "linewidth": 0.5}
        bars = axes.barh(devices, widths, left=left, height=0.8, **style)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.bar_label(bars, [f"{total:.0f}" for total in left], padding=3, fontsize=8)
    axes.set(xlim=(0, most * 1.22), ylim=(row["devices"] - 0.5, -0.5))
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")


def add_legend(sheet, rows):
    """Explain the colours: of the operations in a first line, of the memory in a second one."""
    line = legend_handles([row["timeline"] for row in rows], edgecolor=INK, linewidth=0.5)
    if any(operation["stage"] >= row["devices"] for row in rows for operation in row["timeline"]):
        line.append(Patch(facecolor=PAPER, edgecolor=INK, linewidth=0.5, label="paler: later stage"))
    parts = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.5, label=f"memory: {part}")
        for part, (colour, hatch) in MEMORY.items()
    ]
    by_column = [handle for pair in zip_longest(line, parts) for handle in pair if handle]
    sheet.legend(handles=by_column, loc="outside lower center", ncols=max(len(line), len(parts)), fontsize=8)


def span(operation):
    """Return start and length of an operation in milliseconds."""
    return operation["start"] * 1e3, (operation["end"] - operation["start"]) * 1e3


def headline(row) -> str:
    """Return a rung's line: its step after the single device's of the same job, and the speed-up beside its bound."""
    name = row["rung"]
    if row.get("schedule"):
        name += f" ({row['schedule']}, {row['microbatches']} microbatches)"
    devices = f"{row['devices']} device{'s' if row['devices'] > 1 else ''}"
    step = row["step_seconds"] * 1e3
    if row["rung"] == "single":
        return f"{name}, {devices}: step {step:.0f} ms"
    steps = f"step {step * row['speedup']:.0f} → {step:.0f} ms"
    return f"{name}, {devices}: {steps}, speed-up {row['speedup']:.2f} of at most {row['bound']:.2f}"
