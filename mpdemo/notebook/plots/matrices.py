"""Pictures of who has what: small tensors with their numbers, messages between ranks, a ring, ranks on nodes.

    matrices(("x", x), "@", ("up", up, "columns"), "=", ("hidden", x @ up, "columns"))
    messages(("before", [3, 1]), [(0, 1), (1, 0)], ("after", [4, 4]))
    ring([[1, 2], [3, 4]], sent=[0, 1])
    grid([[0, 1], [2, 3]], ("replicas", "stages"), per_node=2)

They are drawn from the tensors themselves, so none can show what isn't there. Gray is what all ranks have. Ranks differ
in colour and in hatches, and the alt text says all numbers and who has them.
"""

from functools import partial
from typing import Any

from matplotlib.patches import Rectangle

from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.style import EDGE, paler, patches, picture
from mpdemo.notebook.show import Bundle

ALL = {"facecolor": "#dddddd"}
RANKS = [  # sparse hatches, since numbers stand on them
    {"facecolor": paler(style.SKY, 0.85)},
    {"facecolor": paler(style.ORANGE, 0.6), "hatch": "//"},
    {"facecolor": paler(style.GREEN, 0.45), "hatch": ".."},
    {"facecolor": paler(style.PURPLE, 0.6), "hatch": "\\\\"},
]
ARROW = {"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.2, "shrinkA": 2, "shrinkB": 2}
INCH = 0.42  # of a number's box


def matrices(*parts: Any, ranks: int = 2, who: str = "rank") -> Bundle:
    """Draw an equation of small tensors, with who has which number.

    Parameters
    ----------
    *parts
        Signs, such as "@" and "→ relu →", and tensors or lists: ``(name, tensor)`` or ``(name, tensor, owner)``. The
        owner is None (all ranks have it), "columns" or "rows" (each rank has an equal part), a rank, or a rank for each
        number, as a tensor or list of the same shape.
    ranks : int
        How many there are. With one, there are no owners.
    who : str
        What they are called, such as "device" where one process drives several.
    """
    tables = [part if isinstance(part, str) else _table(*part, ranks=ranks) for part in parts]
    widths = [0.5 + 0.25 * len(part) if isinstance(part, str) else _width(part) for part in tables]
    tallest = max(len(part[1]) for part in tables if not isinstance(part, str))

    def paint(figure, axes):
        left, owners = 0.0, set()
        for part, width in zip(tables, widths, strict=True):
            middle = left + width / 2
            if isinstance(part, str):
                axes.text(middle, tallest / 2, part, ha="center", va="center", fontsize=13)
            else:
                name, rows, owned = part
                top = (tallest - len(rows)) / 2
                _paint(axes, left, top, rows, owned, width / len(rows[0]))
                owners |= {owner for row in owned for owner in row}
                axes.text(middle, top - 0.2, name, ha="center", fontsize=9)
            left += width
        names = {None: _everyone(ranks, who)} | {rank: f"{who} {rank}" for rank in range(ranks)}
        _finish(figure, axes, (-0.1, left + 0.1), (tallest + 0.1, -0.7), owners, ranks, names)

    text = " ".join(part if isinstance(part, str) else _in_words(*part, ranks, who) for part in tables)
    return picture(paint, text, None, max(5.0, INCH * sum(widths) + 0.4), INCH * tallest + 0.9)


def messages(*moments: Any) -> Bundle:
    """Draw what each rank has at some moments, one below the other, and arrows for what is sent in between.

    Parameters
    ----------
    *moments
        ``(name, values)`` with a number, tensor or list per rank, in turn with lists of arrows, ``(from, to)`` each.
        What all ranks have is gray.
    """
    states = [(name, [_rows(value) for value in values]) for name, values in moments[::2]]
    ranks, widest = (
        len(states[0][1]),
        max(_widest(rows) * len(rows[0]) for _, all_of in states for rows in all_of),
    )
    step = widest + 1.2

    def paint(figure, axes):
        top, owners = 0.0, set()
        for number, (name, values) in enumerate(states):
            equal, tall = ranks > 1 and all(rows == values[0] for rows in values), max(map(len, values))
            for rank, rows in enumerate(values):
                owned, wide = _owned(rows, None if equal else rank, ranks), _widest(rows)
                _paint(axes, step * rank + (widest - wide * len(rows[0])) / 2, top, rows, owned, wide)
                owners.add(owned[0][0])
            axes.text(-0.4, top + tall / 2, name, ha="right", va="center", fontsize=9)
            for start, end in moments[2 * number + 1] if number + 1 < len(states) else ():
                places = [
                    (step * rank + widest / 2, top + tall + drop) for rank, drop in ((end, 1.4), (start, 0))
                ]
                axes.annotate("", *places, arrowprops=ARROW)
            top += tall + 1.4
        for rank in range(ranks):
            axes.text(step * rank + widest / 2, -0.25, f"rank {rank}", ha="center", fontsize=9)
        left = -0.6 - 0.2 * max(len(name) for name, _ in states)
        _finish(figure, axes, (left, step * ranks - 1.1), (top - 1.3, -0.8), owners, ranks)

    said = [
        f"{name}: " + ", ".join(f"rank {r} {_numbers(v)}" for r, v in enumerate(values))
        for name, values in states
    ]
    for number, arrows in reversed(list(enumerate(moments[1::2]))):
        said.insert(number + 1, "sent: " + ", ".join(f"{start} to {end}" for start, end in arrows))
    heights = sum(max(map(len, values)) + 1.4 for _, values in states)
    return picture(
        paint, "; ".join(said), None, max(5.0, INCH * (step * ranks + 2.5)), INCH * heights + 0.5
    )


def ring(chunks: Any, sent: list[int] | None = None, done: Any = None) -> Bundle:
    """Draw the chunks of ranks that stand in a ring, with an arrow from the one that each sends to its neighbour.

    Parameters
    ----------
    chunks
        A row for each rank: its chunks, from the top of the picture.
    sent : list, optional
        By rank the number of the chunk that goes to the next rank, and from the last one to the first.
    done : optional
        The finished value of each chunk: chunks that have it are gray.
    """
    chunks, done = _rows(chunks), None if done is None else _rows(done)[0]
    ranks, wide = len(chunks), _widest(chunks)
    step = wide + 1.3

    def paint(figure, axes):
        owners = set()
        for rank, column in enumerate(chunks):
            owned = [[None if done and value == done[row] else rank] for row, value in enumerate(column)]
            owners |= {owner for (owner,) in owned}
            _paint(axes, step * rank, 0, [[value] for value in column], owned, wide)
            axes.text(step * rank + wide / 2, -0.25, f"rank {rank}", ha="center", fontsize=9)
            if sent:
                leaves, height = step * rank + wide, sent[rank] + 0.5
                axes.annotate("", (leaves + 1.3, height), (leaves, height), arrowprops=ARROW)
                if rank == ranks - 1:  # it arrives at the first one
                    axes.annotate("", (0, height), (-1.3, height), arrowprops=ARROW)
        names = {None: "finished"}
        _finish(
            figure, axes, (-1.4, step * ranks + 0.1), (len(chunks[0]) + 0.1, -0.8), owners, ranks, names
        )

    said = [f"rank {rank} has the chunks {_numbers([column])[1:-1]}" for rank, column in enumerate(chunks)]
    said = [f"{text} and sends number {sent[rank]}" if sent else text for rank, text in enumerate(said)]
    text = "a ring: " + "; ".join(said)
    return picture(paint, text, None, max(5.0, INCH * (step * ranks + 1.5)), INCH * len(chunks[0]) + 1.0)


def grid(mesh: Any, names: tuple[str, str] = ("rows", "columns"), per_node: int = 0) -> Bundle:
    """Draw the ranks of a mesh of two dimensions, the groups of each dimension, and the nodes.

    Parameters
    ----------
    mesh
        The ranks, as ``DeviceMesh.mesh`` or a list of rows.
    names : tuple
        What the ranks of a column are to each other, and those of a row, such as ``("replicas", "stages")``.
    per_node : int
        How many ranks a node has. Ranks of one node have one look.
    """
    rows = _rows(mesh)
    tall, wide = len(rows), len(rows[0])
    nodes = [[rank // per_node if per_node else 0 for rank in row] for row in rows]

    def paint(figure, axes):
        for row in range(tall):
            axes.plot(
                [0.6, 2 * wide - 1], [2 * row + 0.5] * 2, color=style.VERMILLION, linewidth=2.5, zorder=0
            )
        for column in range(wide):
            line = {"color": style.INK, "linewidth": 2.5, "linestyle": ":", "zorder": 0}
            axes.plot([2 * column + 0.6] * 2, [0.5, 2 * tall - 1.5], **line)
        for row, ranks in enumerate(rows):
            for column, rank in enumerate(ranks):
                place = partial(_paint, axes, 2 * column, 2 * row, [[f"rank {rank}"]])
                place([[nodes[row][column] if per_node else None]], 1.3)
        owners = {node for row in nodes for node in row} if per_node else set()
        labels = {node: f"node {node}" for node in owners}
        lines = axes.lines[0], axes.lines[-1]
        for line, name in zip(lines, reversed(names), strict=True):
            line.set_label(name)
        limits = (-0.2, 2 * wide - 0.5), (2 * tall - 0.8, -0.2)
        _finish(figure, axes, *limits, owners, len(owners), labels, lines)

    words = [f"{names[1]}: {', '.join(map(str, row))}" for row in rows]
    words += [f"{names[0]}: {', '.join(map(str, column))}" for column in zip(*rows, strict=True)]
    text = "a grid of ranks; " + "; ".join(words) + (f"; {per_node} ranks on each node" if per_node else "")
    return picture(paint, text, None, max(5.0, 2 * INCH * wide + 1), 2 * INCH * tall + 0.8)


def _rows(value) -> list:
    """Return a number, a list or a tensor of at most two dimensions as rows."""
    value = value.tolist() if hasattr(value, "tolist") else value
    value = list(value) if isinstance(value, list | tuple | range) else [value]
    return [list(row) for row in value] if isinstance(value[0], list | tuple | range) else [value]


def _owned(rows, owner, ranks) -> list:
    """Return the rank that has each number, or None if all have it."""
    if owner is None or isinstance(owner, int):
        return [[owner] * len(row) for row in rows]
    if not isinstance(owner, str):
        return _rows(owner)
    length = {"rows": len(rows), "columns": len(rows[0])}[owner]
    return [
        [(i if owner == "rows" else j) * ranks // length for j in range(len(row))]
        for i, row in enumerate(rows)
    ]


def _table(name, value, owner=None, ranks=2):
    rows = _rows(value)
    return name, rows, _owned(rows, owner, ranks)


def _label(number) -> str:
    return number if isinstance(number, str) else f"{number:.4g}"


def _widest(rows) -> float:
    """Return how wide the boxes of these numbers are, in boxes of one digit."""
    return max(1.0, 0.4 + 0.26 * max(len(_label(number)) for row in rows for number in row))


def _width(table):
    name, rows, _ = table
    return max(_widest(rows) * len(rows[0]), 0.22 * len(name) + 0.1)


def _paint(axes, left, top, rows, owned, width):
    """Paint numbers in the looks of their ranks."""
    for i, row in enumerate(rows):
        for j, number in enumerate(row):
            look = ALL if owned[i][j] is None else RANKS[owned[i][j] % len(RANKS)]
            axes.add_patch(Rectangle((left + j * width, top + i), width, 1, **EDGE, **look))
            paper = {
                "facecolor": look["facecolor"],
                "edgecolor": "none",
                "pad": 2,
            }  # no hatch behind a number
            x, y = left + (j + 0.5) * width, top + i + 0.5
            axes.text(
                x, y, _label(number), ha="center", va="center", bbox=paper if "hatch" in look else None
            )


def _finish(figure, axes, across, down, owners, ranks, names=None, lines=()):
    """Set the view, and name the looks that were used, unless everything is everyone's."""
    axes.set(xlim=across, ylim=down, aspect="equal")
    axes.set_axis_off()
    called = {None: _everyone(ranks)} | (names or {})
    looks = [
        (owner, ALL if owner is None else RANKS[owner % len(RANKS)]) for owner in sorted(owners, key=str)
    ]
    named = [(called.get(owner, f"rank {owner}"), look | EDGE) for owner, look in looks]
    if owners - {None} or lines:
        columns = 3 if lines else 4
        figure.legend(handles=[*patches(named), *lines], loc="outside lower center", ncols=columns)


def _numbers(rows) -> str:
    return "[" + ", ".join("[" + ", ".join(map(_label, row)) + "]" for row in rows) + "]"


def _everyone(ranks, who="rank") -> str:
    return f"{'both' if ranks == 2 else 'all'} {who}s"


def _in_words(name, rows, owned, ranks, who) -> str:
    """Return a tensor's name, its numbers, and who has them."""
    owners, said = {owner for row in owned for owner in row}, f"{name} {_numbers(rows)}".strip()
    if ranks == 1:
        return said
    if owners == {None}:
        return f"{said} ({_everyone(ranks, who)})"
    if len(owners) == 1:
        return f"{said} ({who} {owners.pop()})"
    everyone = _everyone(ranks, who).split()[0]
    whose = [[everyone if owner is None else owner for owner in row] for row in owned]
    return f"{said} (of {who}s {_numbers(whose)})"
