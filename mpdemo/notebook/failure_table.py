"""The table of all known failures, from the data of `mpdemo.jobs.explain`. Shown in 10_when_it_breaks.ipynb."""

from mpdemo.jobs.explain import known_failures
from mpdemo.notebook.bundle import Bundle


def failure_table(*kinds) -> Bundle:
    """Return a table: what you see, what it is, what to do.

    Parameters
    ----------
    *kinds : str
        Those of `mpdemo.jobs.explain.KINDS` that are shown; without any: all.
    """
    rows = [known for known in known_failures() if not kinds or known.kind in kinds]
    lines = ["| you see | it is | do | notebook |", "|---|---|---|---|"]
    for known in rows:
        seen = "<br>".join(_cell(words, known.kind != "silent") for words in known.seen)
        link = f"[{known.notebook[:2]}]({known.notebook}.ipynb)"
        lines.append(f"| {seen} | {_cell(known.what)} | {_cell(known.do)} | {link} |")
    return Bundle(f"{len(rows)} known failures", markdown="\n".join(lines))


def _cell(text, is_code=False) -> str:
    """A text for a table's cell, where a bar would end it and a hash or a dollar could mean something else."""
    text = text.replace("|", "\\|")
    return f"`{text}`" if is_code else text.replace("$", "\\$").replace("_", "\\_")
