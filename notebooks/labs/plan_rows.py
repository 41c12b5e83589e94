"""Some rows of `mpdemo plan`, as a table that a notebook has room for.

Taught in notebooks/72_which_one.ipynb and 74_offload_8bit.ipynb.
"""

import json
from pathlib import Path

from tabulate import tabulate

from mpdemo.notebook.show import Bundle

HEADINGS = "strategy", "fits", "peak (GiB)", "step (ms)", "between", "runs compared with"


def read(path) -> dict:
    """Return the rows that `mpdemo plan --json` wrote, by the name of their strategy."""
    return {row["strategy"]: row for row in json.loads(Path(path).read_text())["rows"]}


def table(rows, *names) -> Bundle:
    """Show the plan of some strategies, or of all, and with how many published runs such rows were compared."""
    texts = []
    for name in names or [name for name, row in rows.items() if row["memory_mib"]]:
        row = rows[name]
        step, runs = f"{1000 * row['seconds']:,.0f}", str(row["runs_compared"] or "none")
        between = " and ".join(f"{1000 * end:,.0f}" for end in row["between"] or ())
        texts.append([name, row["fits"], f"{row['memory_mib'] / 1024:.0f}", step, between, runs])
    align = ["left", "left", "right", "right", "right", "right"]
    plain, html = (
        tabulate(texts, HEADINGS, look, colalign=align, disable_numparse=True) for look in ("plain", "html")
    )
    return Bundle(plain, html=html)
