"""Some rows of `mpdemo plan`, as a table that a notebook has room for.

Taught in notebooks/72_which_one.ipynb and 74_offload_8bit.ipynb.
"""

import json
from pathlib import Path

from tabulate import tabulate

from mpdemo.notebook.show import Bundle

HEADINGS = "strategy", "fits", "peak (GiB)", "step (ms)", "runs compared with"


def read(path) -> dict:
    """Return the rows that `mpdemo plan --json` wrote, by the name of their strategy."""
    return {row["strategy"]: row for row in json.loads(Path(path).read_text())["rows"]}


def table(rows, *names) -> Bundle:
    """Show the plan of some strategies, or all, and with how many published runs such rows were compared."""
    texts = []
    for name in names or rows:
        row = rows[name]
        step = f"{1000 * row['seconds']:,.0f}" + (f" ± {row['spread']:.0%}" if row["spread"] else "")
        runs = str(row["runs_compared"] or "none")
        texts.append([name, "yes" if row["fits"] else "no", f"{row['memory_mib'] / 1024:.0f}", step, runs])
    align = ["left", "left", "right", "right", "right"]
    plain, html = (
        tabulate(texts, HEADINGS, look, colalign=align, disable_numparse=True) for look in ("plain", "html")
    )
    return Bundle(plain, html=html)
