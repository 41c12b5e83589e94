"""The ladder so far: one row for each rung that has run. Every notebook of the course adds the row of its rung.

A rung's row is read from two folders: ``runs/story_RUNG``, where it was trained, and ``runs/speed_RUNG``, where
``python -m mpdemo.labs.story`` timed it in turn with the single device. A rung of which neither is there is skipped.
"""

import json

from mpdemo import paths
from mpdemo.errors import UserError, did_you_mean
from mpdemo.jobs.record import read_text
from mpdemo.notebook.bundle import Bundle
from mpdemo.notebook.plots import curves, ladder_so_far
from mpdemo.notebook.rung_table import COLUMNS, table
from mpdemo.settings import RUNGS
from mpdemo.log import rows_in

SO_FAR = [name for name in COLUMNS if name not in ("form", "processes")]
FOOT = (
    "Loss and accuracy are of the validation images, after the training. The speed-up is the median time of a step on "
    "the single device over that of the rung; both run in turn in one job, and each rung has a job of its own. Its "
    "bound is the speed-up of independent processes where the devices share the batch or each layer, and of the "
    "simulated schedule where the model is cut; share is speed-up / bound. Gradient diff is the largest difference of "
    "a parameter's gradient from the single device's, divided by the norm of that gradient. MiB per device: the peak "
    "of a step, as computed by mpdemo/plan/memory.py (of fsdp and tensor an estimate). Gradients that are dropped "
    "after a step leave their room to the activations, whose bar is what they need beyond it."
)


def ladder_table() -> Bundle:
    """Show one row for each rung that has run, in text and HTML; name the notebooks of the others.

    The numbers are measured: a notebook's cell that shows this table is not compared from run to run.

    Raises
    ------
    UserError
        No rung has run yet.
    """
    rows = rows_so_far()
    notes = [*missing(rows), FOOT]
    html = table(rows, SO_FAR, "html") + "".join(f"<p>{note}</p>" for note in notes)
    return Bundle("\n".join([table(rows, SO_FAR), *notes]), html=html)


def ladder_chart() -> Bundle:
    """Show one training step of each rung that has run, on one time axis, and the memory of every device.

    Raises
    ------
    UserError
        No rung has been timed yet.
    """
    rows = [row for row in rows_so_far() if row.get("timeline")]
    if not rows:
        raise UserError("no rung has been timed yet; run the job of notebook 01 that writes runs/speed_single")
    return ladder_so_far(rows)


def loss_over_single(rung) -> Bundle:
    """Draw a rung's loss curve over the single device's; the headline is their largest difference.

    Parameters
    ----------
    rung : str
        A name of `mpdemo.settings.RUNGS` that was trained in ``runs/story_RUNG``.

    Raises
    ------
    UserError
        Not a rung, or one of the two has not been trained.
    """
    if rung not in RUNGS:
        raise UserError(f"no rung {rung!r}; allowed: {', '.join(RUNGS)}{did_you_mean(rung, RUNGS)}")
    single, other = ({row["step"]: row["loss"] for row in losses(name)} for name in ("single", rung))
    step = max(single.keys() & other.keys(), key=lambda step: abs(single[step] - other[step]))
    difference = abs(single[step] - other[step])
    title = f"largest difference of {len(single.keys() & other.keys())} losses: {difference:.1e}, in step {step}"
    return curves({name: losses(name) for name in ("single", rung)}, title=title)


def losses(rung) -> list[dict]:
    """Return the rows of the steps of a rung's training."""
    run = folder("story", rung)
    rows = [row for row in rows_in(run) if row["event"] == "step"]
    if not rows:
        raise UserError(f"no step in runs/{run.name}; train it in notebook {number(rung)}")
    return rows


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


def missing(rows) -> list[str]:
    """Return a sentence that names the rungs that were not both trained and timed; none if all were."""
    complete = {row["rung"] for row in rows if "loss" in row and "speedup" in row}
    open_rungs = [f"{rung} (notebook {number(rung)})" for rung in RUNGS if rung not in complete]
    return [f"Not yet trained and timed: {', '.join(open_rungs)}."] if open_rungs else []


def summary(kind, rung) -> dict:
    """Return what a run of a rung left when it ended, an empty dictionary before."""
    return json.loads(read_text(folder(kind, rung) / "summary.json") or "{}")


def folder(kind, rung):
    """Return the folder of a rung's run: ``runs/story_RUNG`` or ``runs/speed_RUNG``."""
    return paths.root() / "runs" / f"{kind}_{rung}"


def number(rung) -> str:
    """Return the number of the notebook that teaches a rung: 01 teaches the first one, 07 the last two."""
    return f"{min(RUNGS.index(rung) + 1, 7):02}"
