"""Where the time of a step goes: its parts on every rank, and which rank the others wait for; the buckets of DDP.

Taught in notebooks/08_scaling.ipynb and notebooks/03_ddp.ipynb; the rows come from the labs of these notebooks.
"""

from statistics import median

from mpdemo.errors import UserError
from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.style import EDGE, name_bars, paler, picture, stack

PARTS = {  # name in the legend, colour, hatch
    "loading": ("loading", paler(style.ORANGE, 0.85), "...."),
    "forward": ("forward", paler(style.SKY, 0.85), ""),
    "backward": ("backward", paler(style.GREEN, 0.85), ""),
    "exposed": ("communication, exposed", paler(style.VERMILLION, 0.7), "////"),
    "optimizer": ("optimizer", paler(style.PURPLE, 0.85), ""),
    "other": ("Python between them", style.PAPER, ""),
}
HIDDEN = "communication, hidden"
LEAST_LEAD = 0.1  # of a step: a rank whose own work is ahead by less is no straggler
BAR, GAP = 0.56, 0.6  # height of a bar, space between two cases; a rank's row is 1


def step_parts(rows):
    """Draw the parts of every rank's step, and below each bar the communication that is hidden behind them.

    Parameters
    ----------
    rows : list of dict
        `case`, `rank`, and the seconds of each part: `loading`, `forward`, `backward`, `optimizer`, `exposed`,
        `other`, and `hidden`.
    """
    if not rows:
        raise UserError("no rows to draw; give step_parts() the rows of the job's summary")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    heights = [number + GAP * cases.index(row["case"]) for number, row in enumerate(rows)]

    def paint(figure, axes):
        parts = [
            ([1000 * row[part] for row in rows], {"label": label, "color": colour, "hatch": hatch} | EDGE)
            for part, (label, colour, hatch) in PARTS.items()
        ]
        stack(axes, heights, parts, BAR)
        # what is hidden, is hidden behind the backward pass
        ends = [1000 * (row["loading"] + row["forward"] + row["backward"]) for row in rows]
        starts = [max(0.0, end - 1000 * row["hidden"]) for end, row in zip(ends, rows, strict=True)]
        low, widths = [height + BAR / 2 + 0.09 for height in heights], [1000 * row["hidden"] for row in rows]
        axes.barh(low, widths, left=starts, height=0.16, color=paler(style.VERMILLION, 0.7), label=HIDDEN, **EDGE)
        name_bars(axes, heights, [f"{row['case']}, rank {row['rank']}" for row in rows])
        axes.set(xlabel="time in a step (ms)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, fontsize=8)

    text = f"the parts of a step of each of {len({row['rank'] for row in rows})} ranks: {', '.join(cases)}"
    return picture(paint, text, "; ".join(map(_described, rows)), 7.6, 1.5 + 0.42 * (heights[-1] + 1))


def _described(row) -> str:
    parts = ", ".join(f"{label} {1000 * row[part]:.0f} ms" for part, (label, *_) in PARTS.items())
    return f"{row['case']}, rank {row['rank']}: {parts}, {HIDDEN} {1000 * row['hidden']:.0f} ms"


def own_work(row) -> float:
    """Return the seconds of a step in which a rank did not wait for the others: all but the exposed communication."""
    return sum(row[part] for part in PARTS if part != "exposed")


def straggler(rows) -> str:
    """Say which rank of a case the others wait for, if one leads by a tenth of the step, and what takes it so long."""
    case, slow = rows[0]["case"], max(rows, key=own_work)
    others = [row for row in rows if row is not slow]
    step = max(own_work(row) + row["exposed"] for row in rows)
    lead = own_work(slow) - median(own_work(row) for row in others) if others else 0.0
    if lead < LEAST_LEAD * step:
        middle = {part: median(row[part] for row in rows) for part in PARTS if part != "other"}
        largest = max(middle, key=middle.get)
        return (
            f"{case}: no straggler, the ranks' own work differs by {lead / step:.0%} of the step; "
            f"the largest part of a step is {PARTS[largest][0]}, {middle[largest] / step:.0%} of it."
        )
    leads = {part: slow[part] - median(row[part] for row in others) for part in PARTS if part != "exposed"}
    return (
        f"{case}: rank {slow['rank']} is the straggler, its own work takes {1000 * lead:.0f} ms longer than that "
        f"of the others, most of it in: {PARTS[max(leads, key=leads.get)][0]}."
    )


def buckets(step):
    """Draw when each bucket of gradients was ready and when its all-reduce had ended.

    `step` has ``forward``, ``backward`` (s since the step began) and ``buckets``: dicts of `mib`, `ready`, `reduced`.
    """
    rows = sorted(step["buckets"], key=lambda row: row["ready"])
    last = rows[-1]["ready"]
    lanes = {"forward": (0, step["forward"], style.SKY), "backward": (step["forward"], last, style.GREEN)}
    for number, row in enumerate(rows, 1):
        lanes[f"bucket {number}, {row['mib']:.0f} MiB"] = row["ready"], row["reduced"], style.VERMILLION

    def paint(figure, axes):
        for height, (start, end, colour) in enumerate(lanes.values()):
            axes.barh(height, end - start, left=start, height=0.62, color=colour, **EDGE)
        axes.axvline(last, color=style.VERMILLION, linestyle="--", linewidth=1.5, label="the last gradient is ready")
        name_bars(axes, range(len(lanes)), list(lanes))
        axes.set(xlabel="time since the step began (s)", xlim=(0, max(step["backward"], rows[-1]["reduced"]) * 1.03))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1))

    text = f"one step of DDP: forward, backward and the all-reduce of {len(rows)} buckets"
    return picture(paint, text, None, 7.2, 1.3 + 0.36 * len(lanes))
