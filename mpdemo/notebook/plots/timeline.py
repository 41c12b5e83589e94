"""The timeline of a pipeline: one lane a rank, its operations numbered by microbatch, idle time hatched."""

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpdemo.errors import UserError
from mpdemo.notebook.plots.style import FAINT, GREEN, INK, ORANGE, PAPER, PURPLE, SKY, STYLE, bundle
from mpdemo.plan import Simulation
from mpdemo.timeline import read

COLOURS = {"F": SKY, "B": GREEN, "I": GREEN, "W": ORANGE}
WORDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
NARROWEST = 0.012  # share of the picture's width that a box needs to carry a number


def timeline(measured=None, ideal=None, *, unit="s", width=8.0):
    """Draw what every rank did when, the ideal schedule beneath it, and the idle share of both.

    Parameters
    ----------
    measured : list of dict, optional
        Rows of one step, from `mpdemo.timeline.read.load`.
    ideal : mpdemo.plan.Simulation, optional
        The same pipeline simulated, drawn beneath on the same time axis. Either one may be left out.
    unit : str
        What the times are counted in; seconds shorter than one are drawn in milliseconds.
    width : float
        Inches.

    Returns
    -------
    Bundle
        The picture, and a line without measured numbers.
    """
    parts = _parts(measured, ideal)
    return bundle(figure(parts, unit, width), _words(parts))


def _parts(measured, ideal):
    """Return what there is to draw: a list of (title, rows)."""
    parts = []
    if measured is not None:
        parts.append(("measured", measured))
    if ideal is not None:
        parts.append(("ideal" if parts else "simulated", ideal.events if isinstance(ideal, Simulation) else ideal))
    if not parts or not all(rows for _, rows in parts):
        raise UserError("no operations to draw; give timeline() a recorded step, a simulation, or both")
    return parts


def figure(parts, unit="s", width=8.0):
    """Return the matplotlib figure: one panel for each (title, rows), all on one time axis."""
    longest = max(read.step_time(rows) for _, rows in parts)
    scale, name = (1e3, "ms") if unit == "s" and longest < 1 else (1.0, unit)
    ranks = [1 + max(row["rank"] for row in rows) for _, rows in parts]
    with rc_context(STYLE):
        lanes = 0.34 if max(ranks) <= 8 else max(0.06, 2.7 / max(ranks))
        sheet = Figure(figsize=(width, 1.15 + sum(0.45 + lanes * count for count in ranks)), layout="constrained")
        panels = sheet.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
        for axes, (title, rows), count in zip(panels, parts, ranks, strict=True):
            _paint(axes, rows, count, longest, scale)
            idle, step = read.idle_share(rows), read.step_time(rows)
            axes.set_title(f"{title}: step {step * scale:.3g} {name}, idle {idle:.0%}", loc="left", fontsize=10)
        panels[-1].set_xlabel(f"time ({name})")
        kinds = [kind for kind in COLOURS if any(row["kind"] == kind for _, rows in parts for row in rows)]
        handles = [Patch(facecolor=COLOURS[kind], alpha=_alpha(kind), label=WORDS[kind]) for kind in kinds]
        handles.append(Patch(facecolor=PAPER, edgecolor=FAINT, hatch="////", label="idle"))
        sheet.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return sheet


def _paint(axes, rows, ranks, longest, scale):
    """Fill one panel: hatched lanes, boxes on them, numbers where they fit, a tick where a result was sent."""
    for rank in range(ranks):
        axes.broken_barh(
            [(0, longest * scale)], (rank - 0.4, 0.8), facecolor=PAPER, edgecolor=FAINT, hatch="////", linewidth=0
        )
        lane = [row for row in rows if row["rank"] == rank and row["kind"] in COLOURS]
        first = min((row["stage"] for row in lane), default=0)
        for kind in COLOURS:
            for later in (False, True):  # a rank's later stages are drawn paler
                boxes = [row for row in lane if row["kind"] == kind and (row["stage"] != first) is later]
                spans = [(row["start"] * scale, (row["end"] - row["start"]) * scale) for row in boxes]
                for colour, alpha in (("white", 1), (COLOURS[kind], _alpha(kind) * (0.55 if later else 1))):
                    axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor=colour, alpha=alpha, linewidth=0)
                if len(lane) < 150:
                    axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor="none", edgecolor=INK, linewidth=0.5)
        for row in lane:
            if row["end"] - row["start"] > NARROWEST * longest and ranks <= 16:
                middle = (row["start"] + row["end"]) / 2 * scale
                axes.text(middle, rank, str(row["microbatch"]), ha="center", va="center", fontsize=7, clip_on=True)
    sends = [row for row in rows if row["kind"] == "send"]
    axes.plot([row["start"] * scale for row in sends], [row["rank"] + 0.4 for row in sends], "|", color=PURPLE, ms=4)
    axes.set(xlim=(0, longest * scale), ylim=(ranks - 0.5, -0.5))
    axes.set_yticks(range(ranks) if ranks <= 16 else range(0, ranks, ranks // 8))
    axes.set_yticklabels([f"rank {tick:.0f}" for tick in axes.get_yticks()])
    axes.grid(visible=False)


def _alpha(kind):
    return 0.6 if kind == "I" else 0.85


def _words(parts):
    """Say what is drawn, without a measured number."""
    rows = parts[0][1]
    ranks = 1 + max(row["rank"] for row in rows)
    microbatches = 1 + max(row["microbatch"] for row in rows)
    stages = (1 + max(row["stage"] for row in rows)) // ranks
    what = " above ".join(title for title, _ in parts)
    each = f", {stages} stages each" if stages > 1 else ""
    parts_of_batch = f"{microbatches} microbatches" if microbatches > 1 else "1 microbatch"
    return f"timeline of {ranks} ranks{each}, {parts_of_batch}: {what}"
