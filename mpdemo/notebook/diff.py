"""Show what changed between two sources, as git does: ``diff("rungs/single.py", "rungs/ddp.py")``."""

import difflib

from mpdemo.notebook.bundle import Bundle
from mpdemo.notebook.show import find


def diff(before, after, name=None, *, docstrings=False, context=3) -> Bundle:
    """Display the lines that two sources do not share, marked with - (before) and + (after).

    Parameters
    ----------
    before, after : str, Path or tuple
        As `target` of `mpdemo.notebook.show.show`; a tuple ``(path, name)`` picks one thing in a file.
    name : str, optional
        The qualified name in both files.
    docstrings : bool
        Whether changes of docstrings count; without them the changed code stands together.
    context : int
        Equal lines kept around a change.
    """
    old, new = _sources(before, after, name, docstrings)
    lines = difflib.unified_diff(
        old.text.splitlines(), new.text.splitlines(), old.title, new.title, lineterm="", n=context
    )
    # the numbers after @@ would count lines of a text without its docstrings
    text = "\n".join("@@" if line.startswith("@@") else line for line in lines)
    if not text:
        return Bundle(f"{old.title} and {new.title} are the same")
    fence = "````" if "```" in text else "```"
    return Bundle(text, markdown=f"{fence}diff\n{text}\n{fence}")


def changed_lines(before, after, name=None) -> int:
    """Return how many lines differ, without docstrings; a line that replaces another counts once."""
    old, new = (source.text.splitlines() for source in _sources(before, after, name, docstrings=False))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return sum(max(i_end - i, j_end - j) for tag, i, i_end, j, j_end in matcher.get_opcodes() if tag != "equal")


def _sources(before, after, name, docstrings):
    targets = (side if isinstance(side, tuple) else (side, name) for side in (before, after))
    return [find(*target, docstrings=docstrings) for target in targets]
