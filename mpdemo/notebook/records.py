"""This run, an H100's record and the reader's own, side by side: what a core's number says of a GPU.

The course's records lie in ``notebooks/gpu``, and ``make gpu-record`` writes the reader's into
``runs/gpu/DATE/record.json``. tests/gpu/record.py says what their parts are.
"""

import re
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from tabulate import tabulate

from mpdemo import foreign, paths
from mpdemo.errors import UserError, one_line, text_of, wrapped
from mpdemo.measure.paired import from_row
from mpdemo.notebook.ladder import step_text
from mpdemo.notebook.show import Bundle


class Kind(NamedTuple):
    """Which part of a record is shown, how its lines are read from that part, and why two devices differ."""

    part: str
    read: Callable[[dict], list[dict[str, str]]]
    why: str


def script(part) -> list[dict[str, str]]:
    """The last speed that a script printed."""
    speeds = re.findall(r"([\d,]+) images/s, MFU ([\d.]+) %, peak ([\d,]+) MiB", "\n".join(part["output"]))
    images, mfu, peak = speeds[-1]
    return [{"images/s": images, "MFU": f"{mfu} %", "peak (MiB)": peak}]


def steps(part) -> list[dict[str, str]]:
    """A model's step without options, and the fraction of a peak that it reaches."""
    row = next((row for row in part["rows"] if not row["options"]), {})
    name, per_step = f"{row['model']}, batch {row['batch']}", f"{1000 * row['median_seconds']:.0f}"
    return [
        {"model": name, "step (ms)": per_step, "MFU": f"{row['mfu']:.0%}", "of": one_line(row["peak_from"])}
    ]


def checkpointing(part) -> list[dict[str, str]]:
    """How many times as long a step takes that recomputes its blocks."""
    times = {"+".join(row["options"]): row["median_seconds"] for row in part["rows"]}
    return [
        {
            "what": one_line(part["rows"][0]["model"]),
            "times as long": f"{times['checkpointing'] / times['']:.2f}",
        }
    ]


def plans(part) -> list[dict[str, str]]:
    """Memory and time of each variant, as measured and as planned."""
    return [
        {
            "model": f"{row['model']}, {' + '.join(row['options']) or 'eager'}",
            "memory (GiB)": f"{row['measured_gib']:.1f}",
            "planned": f"{row['predicted_gib']:.1f}",
            "step (ms)": f"{1000 * row['measured_seconds']:.0f}",
            "planned (ms)": f"{1000 * row['predicted_seconds']:.0f} ± {row['predicted_spread']:.0%}",
        }
        for row in part["rows"]
    ]


def strategy(part) -> list[dict[str, str]]:
    """A strategy's speed-up beside its upper bound."""
    row = part["rows"][-1]
    devices = f"{row['devices']} {'CPU cores' if row['device_type'] == 'cpu' else 'GPUs'}"
    names = {"speed-up": "speedup", "upper bound": "bound", "fraction of bound": "fraction_of_bound"}
    ratios = {heading: str(from_row(row, name)) for heading, name in names.items()}
    return [{"devices": devices, "step (ms)": step_text(row)} | ratios]


KINDS = {
    "train_single": Kind("train_single", script, "The MFU says why a GPU gains little or nothing here: this model "
        "can't keep it busy. A CPU's peak is the whole process's, a GPU's only what PyTorch allocated on it."),
    "gpt": Kind("gpt", steps, "Compare the MFUs and not the steps: the models differ, and so do the precisions. And a "
        "data sheet is a harder standard than a matrix product that was measured."),
    "checkpointing": Kind("gpt", checkpointing, "A whole step also has an output layer, a loss and an optimizer, which "
        "recompute nothing; a block alone has none of them."),
    "predicted": Kind("predicted", plans, "Each plan takes its own card's data sheet, but the fractions of "
        "it that kernels reach from an H100 and from published runs."),
}  # fmt: skip
TWO = Kind("", strategy, "Each device computes and communicates at its own speed, so compare a speed-up with the upper "
    "bound in its line.")  # fmt: skip


def beside(what: str, here: Any = None) -> Bundle:
    """Show this run in a line, below it an H100's record and the reader's own, if any, and say why they differ.

    `what` is one of `KINDS`, or ``two_RUNG``. `here` is what this run has of it as in a record: rows, or what a script
    printed.
    """
    kind = KINDS.get(text_of(what, "what `beside` takes, as 'two_ddp',")) or TWO._replace(part=what)
    rows = []
    if here is not None:
        part = {"output": here.splitlines()} if isinstance(here, str) else {"rows": here}
        rows = [("this run", line) for line in kind.read(part)]
    ours, notes = newest(
        sorted((paths.root() / "notebooks" / "gpu").glob("*.json")), kind, "{}, the course's record"
    )
    own, damaged = newest(sorted((paths.root() / "runs" / "gpu").glob("*/record.json")), kind, "yours: {}")
    lines = [*rows, *ours, *own]
    headings = list(dict.fromkeys(name for _, line in lines for name in line))
    texts = [[label, *(line.get(name, "-") for name in headings)] for label, line in lines]
    align = ["left"] + ["right"] * len(headings)
    plain, table = (
        tabulate(texts, ["", *headings], look, colalign=align, disable_numparse=True)
        for look in ("plain", "html")
    )
    why = [kind.why] if len({label for label, _ in lines}) > 1 else []
    notes = [wrapped(note) for note in (*why, *notes, *damaged)]
    return Bundle(
        "\n".join([plain, *notes]), html=table + "".join(f"<p>{escape(note)}</p>" for note in notes)
    )


def newest(files, kind, label) -> tuple[list, list]:
    """Return the lines of the newest record that has passed a part, and a note for each newer one that is damaged."""
    notes = []
    for file in reversed(files):
        try:
            with foreign.faults(f"{file.relative_to(paths.root())} is no record", "do: make gpu-record"):
                record = foreign.unpacked(file)
                passed = [
                    part
                    for part in record["parts"]
                    if part["part"] == kind.part and part["outcome"] == "passed"
                ]
                if passed:
                    name = one_line(f"{record['device']}, {record['date'][:10]}")
                    return [(label.format(name), line) for line in kind.read(passed[-1])], notes
        except UserError as error:
            notes.append(str(error))
    return [], notes
