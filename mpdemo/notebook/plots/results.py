"""Figures from result rows: loss curves, the ladder of speed-ups, bars, the buckets of a DDP step."""

from matplotlib.ticker import MaxNLocator

from mpdemo.errors import UserError
from mpdemo.notebook.plots.style import BLUE, FAINT, GREEN, INK, SKY, VERMILLION, bundle, draw, line_style

UNITS = {"loss": "loss (nats per image)", "images_per_second": "throughput (images/s)", "time": "time (s)"}


def curves(runs, y="loss", x="step", *, title=None):
    """Draw one curve per run, from the rows of its ``metrics.jsonl``.

    Parameters
    ----------
    runs : dict
        Label -> list of rows, as ``job.metrics()`` returns them. Curves of equal trainings coincide: the first
        one is drawn broad and pale, the next ones thin and dashed on top.
    y, x : str
        Columns. Only the rows that have both are drawn. ``"time"`` counts from each run's first row.
    title : str, optional
        A headline.

    Returns
    -------
    Bundle
        The picture, and a line that names the curves and counts their points.

    Raises
    ------
    UserError
        A run has no row with both columns.
    """
    points = {label: [(row[x], row[y]) for row in rows if x in row and y in row] for label, rows in runs.items()}
    empty = [label for label, pairs in points.items() if not pairs]
    if empty or not points:
        raise UserError(f"no rows with {x!r} and {y!r} in {', '.join(empty) or 'an empty dict'}; did the run finish?")
    if x == "time":
        points = {label: [(time - pairs[0][0], value) for time, value in pairs] for label, pairs in points.items()}

    def paint(axes):
        for index, (label, pairs) in enumerate(points.items()):
            broad = {"linewidth": 5, "alpha": 0.35} if index == 0 and len(points) > 1 else {"linewidth": 1.8}
            marker = {"marker": "o", "markersize": 4} if len(pairs) < 12 else {}
            axes.plot(*zip(*pairs, strict=True), label=label, **line_style(index), **broad, **marker)
        axes.set(xlabel=UNITS.get(x, x), ylabel=UNITS.get(y, y))
        if x in ("step", "epoch"):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no epoch 1.5
        axes.set_title(title or "", fontsize=10)
        if len(points) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside the lines: none may run through it

    counts = ", ".join(f"{label} ({len(pairs)} points)" for label, pairs in points.items())
    return bundle(draw(paint), f"{y} against {x}: {counts}")


def _label_bars(axes, labels):
    """Name the horizontal bars, the first one on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def ladder(rows):
    """Draw the speed-up of every rung beside its upper bound.

    Parameters
    ----------
    rows : list of dict
        The ``rungs`` of ``report.json``: `rung`, `form`, `processes`, `speedup`, `bound` (None where there is none).
    """
    labels = [_rung_label(row) for row in rows]
    speedups = [row["speedup"] for row in rows]
    bounds = {height: row["bound"] for height, row in enumerate(rows) if row.get("bound")}

    def paint(axes):
        axes.barh(range(len(rows)), speedups, color=BLUE, height=0.6, label="measured")
        for height, speedup in enumerate(speedups):
            axes.text(0.03, height, f"{speedup:.2f}", va="center", color="white", weight="bold")
        low, high = ([height + side for height in bounds] for side in (-0.42, 0.42))
        axes.vlines(list(bounds.values()), low, high, color=VERMILLION, linewidth=3, label="bound")
        axes.axvline(1, color=FAINT, linewidth=1, linestyle=":")
        _label_bars(axes, labels)
        axes.set(xlabel="speed-up over one device", xlim=(0, max([*speedups, *bounds.values()]) * 1.15))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)

    figure = draw(paint, width=7.2, height=1.2 + 0.42 * len(rows))
    return bundle(figure, f"speed-up beside its bound: {', '.join(labels)}")


def _rung_label(row) -> str:
    form = f", {row['form']}" if row.get("form") else ""
    processes = row.get("processes", 1)
    return f"{row['rung']}{form} ({processes} process{'es' if processes > 1 else ''})"


def bars(values, unit, bound=None, *, digits=2):
    """Draw one horizontal bar per value, with the number at its end.

    Parameters
    ----------
    values : dict
        Label -> number, or label -> dict of parts that are stacked (``{"forward": 0.1, "backward": 0.2}``).
    unit : str
        Text of the axis, with the unit: ``"time of a step (s)"``.
    bound : float, optional
        A line to compare with.
    digits : int
        Decimal places of the numbers.
    """
    stacks = {label: value if isinstance(value, dict) else {"": value} for label, value in values.items()}
    names = list(dict.fromkeys(name for stack in stacks.values() for name in stack))
    totals = [sum(stack.values()) for stack in stacks.values()]

    def paint(axes):
        left = [0.0] * len(stacks)
        for index, name in enumerate(names):
            widths = [stack.get(name, 0) for stack in stacks.values()]
            colour = line_style(index)["color"] if len(names) > 1 else SKY
            part = axes.barh(range(len(stacks)), widths, left=left, color=colour, height=0.6, label=name or None)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        paper = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1}  # no line runs through a number
        axes.bar_label(part, [f"{total:.{digits}f}" for total in totals], padding=4, bbox=paper)
        if bound is not None:
            axes.axvline(bound, color=GREEN, linewidth=2, linestyle="--", label="bound")
        _label_bars(axes, list(stacks))
        axes.set(xlabel=unit, xlim=(0, max([*totals, bound or 0]) * 1.15))
        if len(names) > 1 or bound is not None:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return bundle(draw(paint, height=1.0 + 0.4 * len(stacks)), f"{unit}: {', '.join(stacks)}")


def buckets(step):
    """Draw when each bucket of gradients was ready and when its all-reduce had ended.

    Parameters
    ----------
    step : dict
        From `mpdemo.labs.ddp.buckets`: ``forward``, ``backward`` (s since the step began) and ``buckets``.

    Returns
    -------
    Bundle
        The picture, and a line without measured numbers.
    """
    rows = sorted(step["buckets"], key=lambda row: row["ready"])
    last = rows[-1]["ready"]
    lanes = [("forward", 0, step["forward"], SKY), ("backward", step["forward"], last, GREEN)]
    lanes += [
        (f"bucket {n}, {row['mib']:.0f} MiB", row["ready"], row["reduced"], BLUE) for n, row in enumerate(rows, 1)
    ]
    names, starts, ends, colours = zip(*lanes, strict=True)
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]

    def paint(axes):
        axes.barh(range(len(lanes)), lengths, left=starts, height=0.62, color=colours, edgecolor=INK, linewidth=0.5)
        axes.axvline(last, color=VERMILLION, linestyle="--", linewidth=1.5, label="the last gradient is ready")
        _label_bars(axes, names)
        axes.set(xlabel="time since the step began (s)", xlim=(0, max(step["backward"], rows[-1]["reduced"]) * 1.03))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1))

    figure = draw(paint, width=7.2, height=1.3 + 0.36 * len(lanes))
    return bundle(figure, f"one step of DDP: forward, backward and the all-reduce of {len(rows)} buckets")
