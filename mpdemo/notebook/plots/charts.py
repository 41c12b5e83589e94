"""Figures from result rows: curves and bars."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.ticker import MaxNLocator

from mpdemo.errors import UserError
from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.style import line_style, name_bars, picture, stack
from mpdemo.notebook.show import Bundle


def curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    y: str = "loss",
    x: str = "step",
    *,
    title: str | None = None,
) -> Bundle:
    """Draw one curve per run, from the rows of its ``metrics.jsonl``.

    Parameters
    ----------
    runs : dict
        Label -> list of rows, as ``job.metrics()`` returns them.
    y, x : str
        Columns. Only the rows that have both are drawn. Where x doubles from point to point, its axis is log2.
    title : str, optional
        A headline.

    Raises
    ------
    UserError
        A run without a row that has both columns.
    """
    points = {
        label: [(row[x], row[y]) for row in rows if x in row and y in row] for label, rows in runs.items()
    }
    empty = [label for label, pairs in points.items() if not pairs]
    if empty or not points:
        raise UserError(
            f"no rows with {x!r} and {y!r} in {', '.join(empty) or 'an empty dict'}; did the run finish?"
        )

    places = sorted({place for pairs in points.values() for place, _ in pairs})
    doubles = len(places) > 2 and all(b == 2 * a for a, b in pairwise(places))

    def paint(figure, axes):
        for index, (label, pairs) in enumerate(points.items()):
            marker = {"marker": "o", "markersize": 4} if len(pairs) < 12 else {}
            axes.plot(*zip(*pairs, strict=True), label=label, **line_style(index), linewidth=1.8, **marker)
        axes.set(xlabel=x, ylabel="loss (nats per image)" if y == "loss" else y)
        if doubles:
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [f"{place:g}" for place in places])
        elif x in ("step", "epoch"):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no epoch 1.5
        axes.set_title(title or "", fontsize=10)
        if len(points) > 1:
            # beside the lines: none may run through it
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    counts = ", ".join(f"{label} ({len(pairs)} points)" for label, pairs in points.items())
    from_to = "{} from {:.4g} ({x} {:g}) to {:.4g} ({x} {:g})"
    told = [
        from_to.format(label, *pairs[0][::-1], *pairs[-1][::-1], x=x) for label, pairs in points.items()
    ]
    return picture(paint, f"{y} against {x}: {counts}", f"{y} against {x}: {'; '.join(told)}")


def bars(values: Mapping[str, Any], unit: str, limit: float | None = None, *, digits: int = 2) -> Bundle:
    """Draw one horizontal bar per value, with the number at its end.

    Parameters
    ----------
    values : dict
        Label -> number, or label -> dict of parts that are stacked (``{"forward": 0.1, "backward": 0.2}``).
    unit : str
        Text of the axis, with the unit: ``"time of a step (s)"``.
    limit : float, optional
        A line to compare with.
    digits : int
        Decimal places of the numbers.
    """
    stacks = {label: value if isinstance(value, dict) else {"": value} for label, value in values.items()}
    names = list(dict.fromkeys(name for parts in stacks.values() for name in parts))
    sizes = [sum(parts.values()) for parts in stacks.values()]
    own_paper = {"facecolor": style.PAPER, "edgecolor": "none", "pad": 1}
    colours = style.CYCLE if len(names) > 1 else [style.SKY]

    def paint(figure, axes):
        widths = [[part.get(name, 0) for part in stacks.values()] for name in names]
        looks = [
            {"color": colour, "label": name or None} for name, colour in zip(names, colours, strict=False)
        ]
        parts = list(zip(widths, looks, strict=True))
        stack(axes, range(len(stacks)), parts)
        for height, size in enumerate(sizes):
            # beside its bar, on the same side of the limit, which doesn't run through it
            text, beside = f"{size:.{digits}f}", {"textcoords": "offset points", "va": "center"}
            axes.annotate(text, (size, height), (4, 0), bbox=own_paper, **beside)
        if limit is not None:
            axes.axvline(limit, color=style.INK, linewidth=2, linestyle="--", label="limit")
        name_bars(axes, range(len(stacks)), list(stacks))
        axes.set(xlabel=unit, xlim=(0, max(*sizes, limit or 0) * 1.15))
        if len(names) > 1 or limit is not None:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    told = []
    for label, parts in stacks.items():
        numbers = [f"{name} {part:.{digits}f}".strip() for name, part in parts.items()]
        told.append(f"{label}: {', '.join(numbers)}")
    line = [] if limit is None else [f"limit: {limit:.{digits}f}"]
    alt = f"{unit}. {'; '.join(told + line)}"
    return picture(paint, f"{unit}: {', '.join(stacks)}", alt, height=1.0 + 0.4 * len(stacks))
