"""Show what changed between two sources, side by side, in a notebook.

The table is drawn by hand because that of difflib.HtmlDiff is unreadable in JupyterLab's dark theme: here the
colours are translucent, and + and - mark the lines for readers who see no colours.

    diff("parallel/single.py", "parallel/ddp.py")
"""

import difflib
import html
import itertools
import re

from mpdemo.notebook.bundle import Bundle
from mpdemo.notebook.show import find

REMOVED, ADDED = "rgba(220,60,60,.16)", "rgba(40,160,70,.18)"
REMOVED_WORD, ADDED_WORD = "rgba(220,60,60,.38)", "rgba(40,160,70,.42)"
ROW = '<tr style="background:transparent">'  # no zebra stripes under the colours
SAME_LINE = 0.45  # two lines at least this similar (0 to 1) are shown as one changed line


def diff(before, after, name=None, *, docstrings=False, context=3) -> Bundle:
    """Display two sources side by side, with the changed words marked.

    Parameters
    ----------
    before, after : str, Path or tuple
        As `target` of `mpdemo.notebook.show.show`; a tuple ``(path, name)`` picks one thing in a file.
    name : str, optional
        The qualified name in both files.
    docstrings : bool
        Whether changes of docstrings count; without them the changed code stands together.
    context : int or None
        Lines kept around a change; None keeps all.

    Returns
    -------
    Bundle
        HTML, and a unified diff as plain text.
    """
    old, new = _sources(before, after, name, docstrings)
    a, b = ([text for _, text in source.lines] for source in (old, new))
    unified = difflib.unified_diff(a, b, old.title, new.title, lineterm="", n=3 if context is None else context)
    table = _table(old, new, "".join(_rows(list(_pairs(old.lines, new.lines)), context)))
    return Bundle("\n".join(unified) or f"{old.title} and {new.title} are the same", html=table)


def changed_lines(before, after, name=None) -> int:
    """Return how many rows the table of `diff` marks; a changed pair of lines counts once, docstrings do not count.

    Parameters
    ----------
    before, after, name
        As in `diff`.
    """
    old, new = _sources(before, after, name, docstrings=False)
    return sum(itertools.starmap(_differ, _pairs(old.lines, new.lines)))


def _sources(before, after, name, docstrings):
    """Return the `Source` of each side."""
    targets = (side if isinstance(side, tuple) else (side, name) for side in (before, after))
    return [find(*target, docstrings=docstrings) for target in targets]


def _pairs(old, new):
    """Yield the table's rows: two lines (number, text) side by side, None where a side has no counterpart."""
    matcher = difflib.SequenceMatcher(None, [text for _, text in old], [text for _, text in new], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        left, right = old[i:i_end], new[j:j_end]
        yield from zip(left, right, strict=True) if tag == "equal" else _similar_pairs(left, right)


def _similar_pairs(left, right):
    """Pair each line of a changed stretch with the most similar line after the last pair."""
    for line in left:
        ratios = [difflib.SequenceMatcher(None, line[1], other[1]).ratio() for other in right]
        if max(ratios, default=0) < SAME_LINE:
            yield line, None
            continue
        best = ratios.index(max(ratios))
        yield from ((None, skipped) for skipped in right[:best])
        yield line, right[best]
        right = right[best + 1 :]
    yield from ((None, rest) for rest in right)


def _differ(left, right) -> bool:
    return left is None or right is None or left[1] != right[1]


def _rows(pairs, context):
    """Yield the rows as HTML; equal rows further than `context` from a change are folded."""
    visible = set(range(len(pairs)))
    if context is not None:
        changes = [number for number, pair in enumerate(pairs) if _differ(*pair)]
        visible = {near for number in changes for near in range(number - context, number + context + 1)}
    for is_visible, group in itertools.groupby(enumerate(pairs), lambda numbered: numbered[0] in visible):
        rows = [_row(*pair) for _, pair in group]
        yield from rows if is_visible else [_fold(len(rows))]


def _row(left, right) -> str:
    old, new = (html.escape(line[1]) if line else "" for line in (left, right))
    if not _differ(left, right):
        return f"{ROW}{_cell(left[0], old)}{_cell(right[0], new)}</tr>"
    if left and right:
        old, new = _mark_words(left[1], right[1])
    old_cell = _cell(f"{left[0]} -", old, REMOVED) if left else _cell("", "")
    new_cell = _cell(f"{right[0]} +", new, ADDED) if right else _cell("", "")
    return f"{ROW}{old_cell}{new_cell}</tr>"


def _cell(number, text, colour=None) -> str:
    both = "vertical-align:top;font-family:monospace"
    margin = f"{both};text-align:right;white-space:nowrap;opacity:.55;font-size:11px;padding:0 4px"
    code = f"{both};text-align:left;white-space:pre-wrap;font-size:12px;padding:0 6px"
    background = f";background:{colour}" if colour else ""
    return f'<td style="{margin}">{number}</td><td style="{code}{background}">{text}</td>'


def _fold(count) -> str:
    lines = "1 equal line" if count == 1 else f"{count} equal lines"
    return f'{ROW}<td colspan="4" style="text-align:center;opacity:.6;font-size:11px">{lines}</td></tr>'


def _mark_words(old, new):
    """Return both lines as HTML, with the words that differ marked."""
    left, right = (re.findall(r"\w+|\s+|.", line) for line in (old, new))
    marked_old = marked_new = ""
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        x, y = html.escape("".join(left[i:i_end])), html.escape("".join(right[j:j_end]))
        marked_old += x if tag == "equal" or not x else f'<span style="background:{REMOVED_WORD}">{x}</span>'
        marked_new += y if tag == "equal" or not y else f'<span style="background:{ADDED_WORD}">{y}</span>'
    return marked_old, marked_new


def _table(old, new, rows) -> str:
    def head(source):
        title = html.escape(source.title)
        link = f'<a href="../{html.escape(source.path)}">{title}</a>' if source.path else title
        return f'<th></th><th style="text-align:left">{link}</th>'

    columns = '<colgroup><col style="width:34px"><col><col style="width:34px"><col></colgroup>'
    # Front ends typeset text between two $ as a formula, except in elements of these classes.
    table = '<table class="tex2jax_ignore mathjax_ignore" style="width:100%;table-layout:fixed">'
    return f"{table}{columns}<tr>{head(old)}{head(new)}</tr>{rows}</table>"
