"""The ladder so far: one row for each strategy that was timed. Every notebook of the course adds its own.

A row is read from ``runs/speed_RUNG``, where a job timed the strategy alternately with the single device. The losses of
``runs/train_RUNG``, where it was trained, are drawn over the single device's.
"""

import json
from itertools import zip_longest

from tabulate import tabulate

from mpdemo import paths
from mpdemo.errors import UserError, did_you_mean
from mpdemo.notebook.plots import curves, style
from mpdemo.notebook.plots.timeline import TimeScale, legend_handles, paint_step
from mpdemo.notebook.show import Bundle
from mpdemo.settings import RUNGS
from mpdemo.training.log import rows_in

MIB = 2**20
MEMORY = {  # part of a device's memory: its look; colours are for operations
    "weights": {"facecolor": "#707070"} | style.EDGE,
    "gradients": {"facecolor": style.PAPER, "hatch": "\\\\\\\\"} | style.EDGE,
    "optimizer": {"facecolor": "#b8b8b8", "hatch": "...."} | style.EDGE,
    "activations": {"facecolor": "#e2e2e2"} | style.EDGE,
}
LANE = 0.36  # inches per device
SHARE_THE_WORK = "data_parallel", "ddp", "fsdp", "tensor"  # limited by processes that do not talk
HEADINGS = "strategy", "devices", "step (ms)", "speed-up", "limit", "MiB per device"
FOOT = (
    "Step: the median step of the single device and of the strategy, timed alternately in one job. Speed-up: the ratio "
    "of the two, and in brackets the middle half of the rounds' ratios. Limit: the best possible speed-up on this "
    f"machine. For {', '.join(SHARE_THE_WORK[:-1])} and {SHARE_THE_WORK[-1]} it is the speed-up of processes that "
    "never communicate, as a range over all jobs that measured it; for a split model, the schedule is simulated with "
    "the measured operations. Memory: the peak of a step, computed."
)


def ladder_table() -> Bundle:
    """Show one row for each strategy that was timed, in text and HTML; name the notebooks of the others.

    The numbers are measured: a notebook's cell that shows this table is not compared from run to run.
    """
    rows = timed_rows()
    missing = [f"{rung} (notebook {number(rung)})" for rung in RUNGS if rung not in {row["rung"] for row in rows}]
    notes = [f"Not timed yet: {', '.join(missing)}."] * bool(missing) + [FOOT]
    html = table(rows, "html") + "".join(f"<p>{note}</p>" for note in notes)
    return Bundle("\n".join([table(rows), *notes]), html=html)


def table(rows, look="plain") -> str:
    """Return the rows as tabulate writes them."""
    shared = [row["bound"] for row in rows if row["rung"] in SHARE_THE_WORK]
    texts = []
    for row in rows:
        limits = shared if row["rung"] in SHARE_THE_WORK else [row["bound"]]
        ends = dict.fromkeys(f"{limit:.2f}" for limit in (min(limits), max(limits)))
        alone = row["rung"] == "single"
        speed = ["-", "-"] if alone else [speedup_text(row), " to ".join(ends)]
        texts.append([row["rung"], row["devices"], step_text(row), *speed, memory_text(row["memory"])])
    align = ["left"] + ["right"] * (len(HEADINGS) - 1)
    return tabulate(texts, HEADINGS, look, colalign=align, disable_numparse=True)


def speedup_text(row) -> str:
    """Return the speed-up and the middle half of the rounds: ``1.72 (1.68 to 1.75)``."""
    low, high = row["speedup_quartiles"]
    return f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})"


def step_text(row) -> str:
    """Return the single device's median step and this strategy's, in ms, from the same job."""
    step = row["step_seconds"] * 1e3
    return f"{step:.0f}" if row["rung"] == "single" else f"{step * row['speedup']:.0f} → {step:.0f}"


def verdict(row) -> str:
    """Say in a line how a measured speed-up compares with its limit, without a cause, which was not measured."""
    low, high = row["speedup_quartiles"]
    least, most = row["bound_quartiles"]
    at_limit = "the ranges overlap, so no difference from the limit can be measured"
    said = at_limit if high >= least else "the gap between them is larger than the spread"
    speed = f"{row['speedup']:.2f} times the single device's speed (half of the rounds: {low:.2f} to {high:.2f})"
    return f"{speed}; the limit is {row['bound']:.2f} ({least:.2f} to {most:.2f}): {said}."


def memory_text(memory) -> str:
    """Return the peak of every device in MiB: ``105, 105``."""
    return ", ".join(f"{sum(device[part] for part in MEMORY) / MIB:.0f}" for device in memory)


def ladder_chart() -> Bundle:
    """Show a step of each strategy that was timed, on one time axis, and beside it the peak memory of every device."""
    rows = timed_rows()
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
    text = "the ladder so far: a step of each strategy on one time axis, and the memory of every device"
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
    """Return a strategy's line: its step after the single device's, and the speed-up beside its limit."""
    name = row["rung"]
    if row.get("schedule"):
        name += f" ({row['schedule']}, {row['microbatches']} microbatches)"
    name += f", {row['devices']} device{'s' if row['devices'] > 1 else ''}"
    if row["rung"] == "single":
        return f"{name}: step {step_text(row)} ms"
    return f"{name}: step {step_text(row)} ms, speed-up {row['speedup']:.2f} of at most {row['bound']:.2f}"


def loss_over_single(rung) -> Bundle:
    """Draw the loss curve of a rung that was trained over the single device's, headed by their largest difference."""
    if rung not in RUNGS:
        raise UserError(f"no rung {rung!r}; allowed: {', '.join(RUNGS)}{did_you_mean(rung, RUNGS)}")
    found = {
        name: [row for row in rows_in(runs() / f"train_{name}") if row["event"] == "step"] for name in ("single", rung)
    }
    for name, rows in found.items():
        if not rows:
            raise UserError(f"no step in runs/train_{name}; train it in notebook {number(name)}")
    single, other = ({row["step"]: row["loss"] for row in rows} for rows in found.values())
    apart = {step: abs(single[step] - other[step]) for step in single.keys() & other.keys()}
    step = max(apart, key=apart.get)
    return curves(
        found, overlay=True, title=f"largest difference of {len(apart)} losses: {apart[step]:.1e}, in step {step}"
    )


def timed_rows() -> list[dict]:
    """Return the rows of all strategies that were timed, in the order of the ladder."""
    timed = {}
    for rung in reversed(RUNGS):  # the single device is timed beside each; its own job has the last word
        timed |= {row["rung"]: row for row in summary(rung).get("rows", [])}
    if not timed:
        raise UserError("nothing was timed yet; begin with notebook 01, which times the single device")
    return [timed[rung] for rung in RUNGS if rung in timed]


def summary(rung) -> dict:
    """Return what the job that timed a strategy left when it ended, an empty dictionary before."""
    file = runs() / f"speed_{rung}" / "summary.json"
    return json.loads(file.read_text()) if file.exists() else {}


def runs():
    """Return the folder of all runs."""
    return paths.root() / "runs"


def number(rung) -> str:
    """Return the number of the notebook that teaches a rung: 01 teaches the first one, 07 the last two."""
    return f"{min(RUNGS.index(rung) + 1, 7):02}"
