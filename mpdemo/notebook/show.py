"""Show source, and what changed between two sources, in a notebook.

PyTorch is not imported for it: the text is found in the file by path and name. Source is a fenced block of
Markdown, coloured by the front end with its own theme. A difference stands side by side, with translucent
colours that read well on light and dark pages, and with + and - for those who see no colours.

    show("parallel/ddp.py")                   a whole file
    show("parallel/ddp.py", "DDP.step")       one thing in it
    show(train_command)                       an object that is imported already
    diff("parallel/single.py", "parallel/ddp.py")
"""

import difflib
import html
import re

from mpdemo.notebook.bundle import Bundle
from mpdemo.notebook.source import find

REMOVED, ADDED = "rgba(220,60,60,.16)", "rgba(40,160,70,.18)"
REMOVED_WORD, ADDED_WORD = "rgba(220,60,60,.38)", "rgba(40,160,70,.42)"
ROW = '<tr style="background:transparent">'  # no zebra stripes under the colours
SAME_LINE = 0.45  # two lines at least this alike (0 to 1) are shown as one changed line


def show(target, name=None, *, docstrings=True, language=None) -> Bundle:
    """Display the source of a file, of a function or class in it, of an object, or of a text.

    Parameters
    ----------
    target, name, docstrings
        As in `mpdemo.notebook.source.find`.
    language : str, optional
        The fence's language, where the file's ending does not say it: ``"bash"`` for a job script's text.

    Returns
    -------
    Bundle
        Markdown, and the title as plain text.
    """
    source = find(target, name, docstrings=docstrings)
    heading = f"[{source.title}](../{source.path})\n\n" if source.path else ""
    fence = "````" if "```" in source.text else "```"
    return Bundle(source.title, markdown=f"{heading}{fence}{language or source.language}\n{source.text}\n{fence}")


def diff(before, after, name=None, *, docstrings=False, context=3) -> Bundle:
    """Display two sources side by side, with what changed marked to the word.

    Parameters
    ----------
    before, after : str, object or tuple
        As `target` of `show`; a tuple ``(path, name)`` picks one thing in a file.
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
    old, new = (
        find(*(side if isinstance(side, tuple) else (side, name)), docstrings=docstrings) for side in (before, after)
    )
    a, b = ([text for _, text in side.lines] for side in (old, new))
    unified = difflib.unified_diff(a, b, old.title, new.title, lineterm="", n=3 if context is None else context)
    rows = "".join(_rows(old.lines, new.lines, context))
    return Bundle("\n".join(unified) or f"{old.title} and {new.title} are the same", html=_table(old, new, rows))


def _table(old, new, rows) -> str:
    def head(source):
        title = html.escape(source.title)
        link = f'<a href="../{html.escape(source.path)}">{title}</a>' if source.path else title
        return f'<th></th><th style="text-align:left">{link}</th>'

    columns = '<colgroup><col style="width:34px"><col><col style="width:34px"><col></colgroup>'
    # Front ends take what stands between two $ for a formula, except in an element of these classes.
    table = '<table class="tex2jax_ignore mathjax_ignore" style="width:100%;table-layout:fixed">'
    return f"{table}{columns}<tr>{head(old)}{head(new)}</tr>{rows}</table>"


def _rows(old, new, context):
    """Yield the table's rows: equal lines, changed pairs, lines of one side only, folded stretches."""
    matcher = difflib.SequenceMatcher(None, [t for _, t in old], [t for _, t in new], autojunk=False)
    groups = [matcher.get_opcodes()] if context is None else matcher.get_grouped_opcodes(context)
    shown = 0
    for group in groups:
        if group and group[0][1] > shown:
            yield _fold(group[0][1] - shown)
        for tag, i, i_end, j, j_end in group:
            if tag == "equal":
                pairs = zip(range(i, i_end), range(j, j_end), strict=True)
            else:
                pairs = _pair(old, new, range(i, i_end), range(j, j_end))
            yield from (_row(old, new, p, q) for p, q in pairs)
        shown = group[-1][2] if group else shown
    if shown < len(old):
        yield _fold(len(old) - shown)


def _pair(old, new, left, right):
    """Yield pairs of line indices of a changed stretch, in order; None where a side has no counterpart."""
    q = right.start
    for p in left:
        alike = [(difflib.SequenceMatcher(None, old[p][1], new[k][1]).ratio(), -k) for k in range(q, right.stop)]
        ratio, k = max(alike, default=(0, 0))
        if ratio < SAME_LINE:
            yield p, None
            continue
        yield from ((None, skipped) for skipped in range(q, -k))
        yield p, -k
        q = -k + 1
    yield from ((None, rest) for rest in range(q, right.stop))


def _row(old, new, p, q) -> str:
    if p is None:
        return f"{ROW}{_cell('', '', '')}{_cell(f'{new[q][0]} +', html.escape(new[q][1]), ADDED)}</tr>"
    if q is None:
        return f"{ROW}{_cell(f'{old[p][0]} -', html.escape(old[p][1]), REMOVED)}{_cell('', '', '')}</tr>"
    if old[p][1] == new[q][1]:
        text = html.escape(old[p][1])
        return f"{ROW}{_cell(old[p][0], text, '')}{_cell(new[q][0], text, '')}</tr>"
    a, b = _words(old[p][1], new[q][1])
    return f"{ROW}{_cell(f'{old[p][0]} -', a, REMOVED)}{_cell(f'{new[q][0]} +', b, ADDED)}</tr>"


def _cell(number, text, colour) -> str:
    both = "vertical-align:top;font-family:monospace"
    margin = f"{both};text-align:right;white-space:nowrap;opacity:.55;font-size:11px;padding:0 4px"
    code = f"{both};text-align:left;white-space:pre-wrap;font-size:12px;padding:0 6px"
    background = f";background:{colour}" if colour else ""
    return f'<td style="{margin}">{number}</td><td style="{code}{background}">{text}</td>'


def _fold(count) -> str:
    lines = "1 equal line" if count == 1 else f"{count} equal lines"
    return f'{ROW}<td colspan="4" style="text-align:center;opacity:.6;font-size:11px">{lines}</td></tr>'


def _words(a, b):
    """Return both lines as HTML, with the words that differ marked."""
    left, right = (re.findall(r"\w+|\s+|.", line) for line in (a, b))
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    out_a = out_b = ""
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        x, y = html.escape("".join(left[i:i_end])), html.escape("".join(right[j:j_end]))
        out_a += x if tag == "equal" or not x else f'<span style="background:{REMOVED_WORD}">{x}</span>'
        out_b += y if tag == "equal" or not y else f'<span style="background:{ADDED_WORD}">{y}</span>'
    return out_a, out_b
