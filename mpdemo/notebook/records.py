"""A strategy's speed-up in this run, in the course's records and in the reader's own, side by side.

The course's records lie in ``notebooks/gpu``, and ``make gpu-record`` writes the reader's into
``runs/gpu/DATE/record.json``. tests/gpu/record.py says what their parts are.
"""

from html import escape

from tabulate import tabulate

from mpdemo import foreign, paths
from mpdemo.errors import UserError, one_line, wrapped
from mpdemo.measure.paired import from_row
from mpdemo.notebook.ladder import step_text
from mpdemo.notebook.show import Bundle

WHY = "Each device computes and communicates at its own speed, so compare a speed-up with the upper bound in its line."


def cells(row) -> dict[str, str]:
    """Return a strategy's speed-up beside its upper bound, by heading."""
    devices = f"{row['devices']} {'CPU cores' if row['device_type'] == 'cpu' else 'GPUs'}"
    names = {"speed-up": "speedup", "upper bound": "bound", "fraction of bound": "fraction_of_bound"}
    ratios = {heading: str(from_row(row, name)) for heading, name in names.items()}
    return {"devices": devices, "step (ms)": step_text(row)} | ratios


def beside(rung, row) -> Bundle:
    """Show this run's row of a strategy, below it the newest of the course's records and of the reader's own."""
    ours, notes = newest(
        sorted((paths.root() / "notebooks" / "gpu").glob("*.json")), rung, "{}, the course's record"
    )
    own, damaged = newest(sorted((paths.root() / "runs" / "gpu").glob("*/record.json")), rung, "yours: {}")
    lines = [("this run", cells(row)), *ours, *own]
    headings = list(lines[0][1])
    texts = [[label, *line.values()] for label, line in lines]
    align = ["left"] + ["right"] * len(headings)
    plain, table = (
        tabulate(texts, ["", *headings], look, colalign=align, disable_numparse=True)
        for look in ("plain", "html")
    )
    why = [WHY] if len(lines) > 1 else []
    notes = [wrapped(note) for note in (*why, *notes, *damaged)]
    return Bundle(
        "\n".join([plain, *notes]), html=table + "".join(f"<p>{escape(note)}</p>" for note in notes)
    )


def newest(files, rung, label) -> tuple[list, list]:
    """Return the line of the newest record that has timed a strategy, and a note for each newer one that is damaged."""
    notes = []
    for file in reversed(files):
        try:
            with foreign.faults(f"{file.relative_to(paths.root())} is no record", "do: make gpu-record"):
                record = foreign.unpacked(file)
                passed = [
                    part
                    for part in record["parts"]
                    if part["part"] == f"two_{rung}" and part["outcome"] == "passed"
                ]
                if passed:
                    name = one_line(f"{record['device']}, {record['date'][:10]}")
                    return [(label.format(name), cells(passed[-1]["rows"][-1]))], notes
        except UserError as error:
            notes.append(str(error))
    return [], notes
