"""One training step of each rung on one time axis, and beside it the memory of every device."""

from itertools import zip_longest

from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.timeline import TimeScale, legend_handles, paint_step

MIB = 2**20
MEMORY = {  # part of a device's memory: its look
    "weights": {"facecolor": style.paler(style.BLUE, 0.9)} | style.EDGE,
    "gradients": {"facecolor": style.paler(style.GREEN, 0.6), "hatch": "\\\\\\\\"} | style.EDGE,
    "optimizer": {"facecolor": style.paler(style.ORANGE, 0.7), "hatch": "...."} | style.EDGE,
    "activations": {"facecolor": style.paler(style.SKY, 0.6)} | style.EDGE,
}
LANE = 0.36  # inches per device


def memory_text(memory) -> str:
    """Return the peak of every device in MiB: ``105, 105``."""
    return ", ".join(f"{sum(device[part] for part in MEMORY) / MIB:.0f}" for device in memory)


def ladder_so_far(rows):
    """Draw the timelines of all rungs below each other, with the peak memory per device to their right.

    A row has `rung`, `devices`, `step_seconds`, `speedup`, `bound`, `timeline` (as `mpdemo.timeline.read` describes it;
    `rank` is the device) and `memory` (one dict of bytes for each device). The numbers are in the alternative text.
    """
    scale = TimeScale(max(operation["end"] for row in rows for operation in row["timeline"]), 1e3, "ms")
    most = max(sum(device[part] for part in MEMORY) for row in rows for device in row["memory"]) / MIB

    def paint(sheet, grid):
        for (time, memory), row in zip(grid, rows, strict=True):
            paint_step(time, headline(row), row["timeline"], scale, "device")
            _paint_memory(memory, row, most)
        grid[-1, 0].set_xlabel("time since the step began (ms)")
        grid[-1, 1].set_xlabel("peak memory (MiB)")
        _add_legend(sheet, rows)

    heights = [row["devices"] + 0.4 for row in rows]
    height = 1.35 + sum(0.42 + LANE * row["devices"] for row in rows)
    ratios = {"height_ratios": heights, "width_ratios": [3, 1], "sharex": "col", "squeeze": False}
    text = "the ladder so far: a step of each rung on one time axis, and the memory of every device"
    alt = "; ".join(f"{headline(row)}, peak memory (MiB) {memory_text(row['memory'])}" for row in rows)
    return style.picture(paint, text, alt, 8.6, height, len(rows), 2, **ratios)


def _paint_memory(axes, row, most):
    """Draw a bar of stacked parts for every device, its total at the end."""
    parts = [([device[part] / MIB for device in row["memory"]], look) for part, look in MEMORY.items()]
    last = style.stack(axes, range(row["devices"]), parts, 0.8)
    axes.bar_label(last, memory_text(row["memory"]).split(", "), padding=3, fontsize=8)
    axes.set(xlim=(0, most * 1.22), ylim=(row["devices"] - 0.5, -0.5))
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")


def _add_legend(sheet, rows):
    """Explain the colours: of the operations in a first line, of the memory in a second one."""
    line = legend_handles([row["timeline"] for row in rows], **style.EDGE)
    if any(operation["stage"] >= row["devices"] for row in rows for operation in row["timeline"]):
        line += style.patches([("paler: later stage", {"facecolor": style.PAPER})], **style.EDGE)
    memory = style.patches((f"memory: {part}", look) for part, look in MEMORY.items())
    by_column = [handle for pair in zip_longest(line, memory) for handle in pair if handle]
    sheet.legend(handles=by_column, loc="outside lower center", ncols=max(len(line), len(memory)), fontsize=8)


def headline(row) -> str:
    """Return a rung's line: its step after the single device's of the same job, and the speed-up beside its bound."""
    name = row["rung"]
    if row.get("schedule"):
        name += f" ({row['schedule']}, {row['microbatches']} microbatches)"
    name += f", {row['devices']} device{'s' if row['devices'] > 1 else ''}"
    step = row["step_seconds"] * 1e3
    if row["rung"] == "single":
        return f"{name}: step {step:.0f} ms"
    steps = f"step {step * row['speedup']:.0f} → {step:.0f} ms"
    return f"{name}: {steps}, speed-up {row['speedup']:.2f} of at most {row['bound']:.2f}"
