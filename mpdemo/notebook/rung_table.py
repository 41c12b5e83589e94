"""Rows of rungs as a table: the demo's, and the ladder so far of the notebooks."""

from tabulate import tabulate

MIB = 2**20
PARTS = "weights", "gradients", "optimizer", "activations"  # of a device's memory


def memory_text(memory) -> str:
    """Return the peak of every device in MiB: ``105, 105``."""
    return ", ".join(f"{sum(device[part] for part in PARTS) / MIB:.0f}" for device in memory)


COLUMNS = {  # of a row: its heading; its format, or a function that writes the value
    "rung": ("rung", ""),
    "form": ("form", ""),
    "processes": ("processes", ""),
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


def table(rows, columns=None, style="plain") -> str:
    """Return rows as a table.

    Parameters
    ----------
    rows : list of dict
    columns : list of str, optional
        Names from COLUMNS; by default all that some row has. A dash stands for a value that a row lacks.
    style : str
        A format of tabulate: ``"plain"``, ``"html"``.
    """
    columns = columns or [name for name in COLUMNS if any(name in row for row in rows)]
    texts = [[_written(row.get(name), COLUMNS[name][1]) for name in columns] for row in rows]
    align = ["left" if name in ("rung", "form") else "right" for name in columns]
    headings = [COLUMNS[name][0] for name in columns]
    return tabulate(texts, headings, style, colalign=align, disable_numparse=True)


def _written(value, form) -> str:
    if value is None:
        return "-"
    return form(value) if callable(form) else format(value, form)
