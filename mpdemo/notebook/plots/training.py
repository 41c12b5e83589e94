"""Figures from result rows: loss curves, the ladder of speed-ups, bars. Nothing here trains or reads a clock."""

from mpdemo.errors import UserError
from mpdemo.notebook.plots.style import BLUE, FAINT, GREEN, INK, SKY, VERMILLION, bundle, draw, looks

UNITS = {
    "loss": "loss (nats an image)",
    "train_loss": "training loss (nats an image)",
    "validation_loss": "validation loss (nats an image)",
    "train_accuracy": "training accuracy (share of images)",
    "validation_accuracy": "validation accuracy (share of images)",
    "images_per_second": "throughput (images/s)",
    "step": "step",
    "epoch": "epoch",
    "time": "time (s)",
    "speedup": "speed-up over one device",
}


def curves(runs, y="loss", x="step", *, title=None):
    """Draw one curve a run, from the rows of its ``metrics.jsonl``.

    Parameters
    ----------
    runs : dict
        Label -> list of rows, as ``job.metrics()`` returns them. Runs that are the same training lie on each
        other: the first is drawn broad and pale, the next ones thin and dashed on top.
    y, x : str
        Columns. Only the rows that have both are drawn. ``"time"`` counts from each run's first row.
    title : str, optional
        A headline.

    Returns
    -------
    Bundle
        The picture, and a line that names the curves and counts their points.
    """
    points = {label: [(row[x], row[y]) for row in rows if x in row and y in row] for label, rows in runs.items()}
    if x == "time":
        points = {label: [(t - found[0][0], v) for t, v in found] for label, found in points.items()}
    empty = [label for label, found in points.items() if not found]
    if empty or not points:
        raise UserError(f"no rows with {x!r} and {y!r} in {', '.join(empty) or 'an empty dict'}; did the run finish?")

    def paint(axes):
        for index, (label, found) in enumerate(points.items()):
            broad = {"linewidth": 5, "alpha": 0.35} if index == 0 and len(points) > 1 else {"linewidth": 1.8}
            marker = {"marker": "o", "markersize": 4} if len(found) < 12 else {}
            axes.plot(*zip(*found, strict=True), label=label, **looks(index), **broad, **marker)
        axes.set(xlabel=UNITS.get(x, x), ylabel=UNITS.get(y, y))
        axes.set_title(title or "", fontsize=10)
        if len(points) > 1:
            axes.legend()

    counts = ", ".join(f"{label} ({len(found)} points)" for label, found in points.items())
    return bundle(draw(paint), f"{y} against {x}: {counts}")


def ladder(rows):
    """Draw the speed-up of every rung beside the bound that it cannot pass.

    Parameters
    ----------
    rows : list of dict
        The ``rungs`` of ``report.json``: `rung`, `form`, `processes`, `speedup`, `bound` (None where there is none).
    """
    labels = [_rung_label(row) for row in rows]

    def paint(axes):
        heights = range(len(rows))
        axes.barh(heights, [row["speedup"] for row in rows], color=BLUE, height=0.6, label="measured")
        for height, row in enumerate(rows):
            axes.text(0.03, height, f"{row['speedup']:.2f}", va="center", color="white", weight="bold")
            if row.get("bound"):
                first = "bound" if height == next(i for i, r in enumerate(rows) if r.get("bound")) else None
                axes.plot(
                    [row["bound"]] * 2, [height - 0.42, height + 0.42], color=VERMILLION, linewidth=3, label=first
                )
        axes.axvline(1, color=FAINT, linewidth=1, linestyle=":")
        axes.set_yticks(heights, labels)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        widest = max(max(row["speedup"], row.get("bound") or 0) for row in rows)
        axes.set(xlabel=UNITS["speedup"], xlim=(0, widest * 1.15))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=2)

    figure = draw(paint, width=7.2, height=1.2 + 0.42 * len(rows))
    return bundle(figure, f"speed-up beside its bound: {', '.join(labels)}")


def _rung_label(row) -> str:
    form = f", {row['form']}" if row.get("form") else ""
    processes = row.get("processes", 1)
    return f"{row['rung']}{form} ({processes} process{'es' if processes > 1 else ''})"


def bars(values, unit, bound=None, *, title=None, digits=2):
    """Draw one horizontal bar a value, with the number written on it.

    Parameters
    ----------
    values : dict
        Label -> number, or label -> dict of parts that are stacked (``{"forward": 0.1, "backward": 0.2}``).
    unit : str
        What the axis counts, with its unit: ``"time a step (s)"``.
    bound : float, optional
        A line to compare with.
    title : str, optional
        A headline.
    digits : int
        Digits behind the point of the written numbers.
    """
    parts = {label: value if isinstance(value, dict) else {"": value} for label, value in values.items()}
    names = list(dict.fromkeys(name for stack in parts.values() for name in stack))

    def paint(axes):
        left = [0.0] * len(parts)
        for index, name in enumerate(names):
            widths = [stack.get(name, 0) for stack in parts.values()]
            colour = looks(index)["color"] if len(names) > 1 else SKY
            axes.barh(range(len(parts)), widths, left=left, color=colour, height=0.6, label=name or None)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for height, total in enumerate(left):
            axes.text(total, height, f" {total:.{digits}f}", va="center", color=INK)
        if bound is not None:
            axes.axvline(bound, color=GREEN, linewidth=2, linestyle="--", label="bound")
        axes.set_yticks(range(len(parts)), list(parts))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=unit, title=title, xlim=(0, max([*left, bound or 0]) * 1.15))
        if len(names) > 1 or bound is not None:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return bundle(draw(paint, height=1.0 + 0.4 * len(parts)), f"{unit}: {', '.join(parts)}")
