"""The ladder so far: one row for each rung that has run. Every notebook of the course adds the row of its rung.

A rung's row is read from two folders: ``runs/story_RUNG``, where it was trained, and ``runs/speed_RUNG``, where a job
timed it alternately with the single device. A rung that has neither is skipped.
"""

import json

from tabulate import tabulate

from mpdemo import paths
from mpdemo.errors import UserError, did_you_mean
from mpdemo.notebook.plots import curves
from mpdemo.notebook.plots.ladder_so_far import ladder_so_far, memory_text
from mpdemo.notebook.show import Bundle
from mpdemo.settings import RUNGS
from mpdemo.training.log import rows_in

COLUMNS = {  # of a row: its heading; its format, or a function that writes the value
    "rung": ("rung", ""),
    "devices": ("devices", ""),
    "loss": ("loss", ".4f"),
    "accuracy": ("accuracy", ".1%"),
    "images_per_second": ("images/s", ".0f"),
    "speedup": ("speed-up", ".2f"),
    "bound": ("bound", ".2f"),
    "fraction_of_bound": ("share", ".0%"),
    "max_relative_gradient_error": ("gradient diff", ".1e"),
    "memory": ("MiB per device", memory_text),
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


def table(rows, style="plain") -> str:
    """Return the rows as tabulate writes them; a dash stands for a value that a row lacks."""

    def cell(value, form):
        return "-" if value is None else form(value) if callable(form) else format(value, form)

    texts = [[cell(row.get(name), form) for name, (_, form) in COLUMNS.items()] for row in rows]
    align = ["left"] + ["right"] * (len(COLUMNS) - 1)
    return tabulate(texts, [head for head, _ in COLUMNS.values()], style, colalign=align, disable_numparse=True)


def ladder_chart() -> Bundle:
    """Show a step of each rung that was timed, on one time axis, and beside it the peak memory of every device."""
    rows = [row for row in rows_so_far() if row.get("timeline")]
    if not rows:
        raise UserError("no rung has been timed yet; run the job of notebook 01 that writes runs/speed_single")
    return ladder_so_far(rows)


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
