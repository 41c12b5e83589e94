"""The ladder so far: one row for each rung that has run. Every notebook of the course adds the row of its rung.

A rung's row is read from two folders: ``runs/story_RUNG``, where it was trained, and ``runs/speed_RUNG``, where a job
timed it alternately with the single device. A rung that has neither is skipped.
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
MEMORY = {  # part of a device's memory: its look
    "weights": {"facecolor": style.paler(style.BLUE, 0.9)} | style.EDGE,
    "gradients": {"facecolor": style.paler(style.GREEN, 0.6), "hatch": "\\\\\\\\"} | style.EDGE,
    "optimizer": {"facecolor": style.paler(style.ORANGE, 0.7), "hatch": "...."} | style.EDGE,
    "activations": {"facecolor": style.paler(style.SKY, 0.6)} | style.EDGE,
}
LANE = 0.36  # inches per device


COLUMNS = {  # of a row: its heading and its format
    "rung": ("rung", ""),
    "devices": ("devices", ""),
    "loss": ("loss", ".4f"),
    "accuracy": ("accuracy", ".1%"),
    "images_per_second": ("images/s", ".0f"),
    "speedup": ("speed-up", ".2f"),
    "bound": ("bound", ".2f"),
    "fraction_of_bound": ("share", ".0%"),
    "max_relative_gradient_error": ("gradient diff", ".1e"),
    "memory": ("MiB per device", "memory"),
}
FOOT = (
    "Loss and accuracy are of the validation images, after the training. Speed-up: the single device's median step "
    "over that of the rung, timed alternately in a job of its own. Bound: the speed-up of independent processes where "
    "the devices share the batch or each layer, of the simulated schedule where the model is cut; share: speed-up / "
    "bound. Gradient diff: the largest difference of a parameter's gradient from the single device's, relative to its "
    "norm. MiB per device: the planned peak of a step; the activations' bar is what they need beyond the room of "
    "gradients that are dropped after a step."
)


def ladder_table() -> Bundle:
    """Show one row for each rung that has run, in text and HTML; name the notebooks of the others.

    The numbers are measured: a notebook's cell that shows this table is not compared from run to run.
    """
    rows = rows_so_far()
    complete = {row["rung"] for row in rows if "loss" in row and "speedup" in row}
    open_rungs = [f"{rung} (notebook {number(rung)})" for rung in RUNGS if rung not in complete]
    notes = [f"Not yet trained and timed: {', '.join(open_rungs)}."] * bool(open_rungs) + [FOOT]
    html = table(rows, "html") + "".join(f"<p>{note}</p>" for note in notes)
    return Bundle("\n".join([table(rows), *notes]), html=html)


def table(rows, look="plain") -> str:
    """Return the rows as tabulate writes them; a dash stands for a value that a row lacks."""

    def cell(value, form):
        if value is None:
            return "-"
        return memory_text(value) if form == "memory" else format(value, form)

    texts = [[cell(row.get(name), form) for name, (_, form) in COLUMNS.items()] for row in rows]
    align = ["left"] + ["right"] * (len(COLUMNS) - 1)
    return tabulate(texts, [head for head, _ in COLUMNS.values()], look, colalign=align, disable_numparse=True)


def memory_text(memory) -> str:
    """Return the peak of every device in MiB: ``105, 105``."""
    return ", ".join(f"{sum(device[part] for part in MEMORY) / MIB:.0f}" for device in memory)


def ladder_chart() -> Bundle:
    """Show a step of each rung that was timed, on one time axis, and beside it the peak memory of every device."""
    rows = [row for row in rows_so_far() if row.get("timeline")]
    if not rows:
        raise UserError("no rung has been timed yet; run the job of notebook 01 that writes runs/speed_single")
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


def loss_over_single(rung) -> Bundle:
    """Draw the loss curve of a rung that was trained over the single device's, headed by their largest difference."""
    if rung not in RUNGS:
        raise UserError(f"no rung {rung!r}; allowed: {', '.join(RUNGS)}{did_you_mean(rung, RUNGS)}")
    runs = {
        name: [row for row in rows_in(folder("story", name)) if row["event"] == "step"] for name in ("single", rung)
    }
    for name, rows in runs.items():
        if not rows:
            raise UserError(f"no step in runs/story_{name}; train it in notebook {number(name)}")
    single, other = ({row["step"]: row["loss"] for row in rows} for rows in runs.values())
    apart = {step: abs(single[step] - other[step]) for step in single.keys() & other.keys()}
    step = max(apart, key=apart.get)
    return curves(runs, title=f"largest difference of {len(apart)} losses: {apart[step]:.1e}, in step {step}")


def rows_so_far() -> list[dict]:
    """Return the rows of all rungs that were trained or timed, in the order of the ladder."""
    timed = {}
    for rung in reversed(RUNGS):  # the single device is timed beside each rung; its own run has the last word
        timed |= {row["rung"]: row for row in summary("speed", rung).get("rows", [])}
    rows = []
    for rung in RUNGS:
        trained = summary("story", rung)
        result = {"loss": trained["validation_loss"], "accuracy": trained["validation_accuracy"]} if trained else {}
        if trained or rung in timed:
            rows.append({"rung": rung} | timed.get(rung, {}) | result)
    if not rows:
        raise UserError("no rung has run yet; begin with notebook 01, which trains on a single device")
    return rows


def summary(kind, rung) -> dict:
    """Return what a run of a rung left when it ended, an empty dictionary before."""
    file = folder(kind, rung) / "summary.json"
    return json.loads(file.read_text()) if file.exists() else {}


def folder(kind, rung):
    """Return the folder of a rung's run: ``runs/story_RUNG`` or ``runs/speed_RUNG``."""
    return paths.root() / "runs" / f"{kind}_{rung}"


def number(rung) -> str:
    """Return the number of the notebook that teaches a rung: 01 teaches the first one, 07 the last two."""
    return f"{min(RUNGS.index(rung) + 1, 7):02}"
