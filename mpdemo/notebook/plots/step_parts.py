"""Where the time of a step goes: a bar of stacked parts for every rank, and which rank the others wait for.

Taught in notebooks/08_scaling.ipynb; the rows come from `mpdemo.labs.where_time_goes`.
"""

from statistics import median

from mpdemo.errors import UserError
from mpdemo.notebook.plots.style import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE, SKY, VERMILLION, bundle, draw, paler

PARTS = {  # name in the legend, colour, hatch
    "loading": ("loading", paler(ORANGE, 0.85), "...."),
    "forward": ("forward", paler(SKY, 0.85), ""),
    "backward": ("backward", paler(GREEN, 0.85), ""),
    "exposed": ("communication, exposed", paler(VERMILLION, 0.7), "////"),
    "optimizer": ("optimizer", paler(PURPLE, 0.85), ""),
    "other": ("Python between them", PAPER, ""),
}
HIDDEN = ("communication, hidden", paler(BLUE, 0.8))
LEAST_LEAD = 0.1  # of a step: a rank whose own work is ahead by less is no straggler
BAR, GAP = 0.56, 0.6  # height of a bar, space between two cases; a rank's row is 1


def step_parts(rows):
    """Draw the parts of every rank's step, and below each bar the communication that is hidden behind them.

    Parameters
    ----------
    rows : list of dict
        `case`, `rank`, and the seconds of each part: `loading`, `forward`, `backward`, `optimizer`, `exposed`,
        `other`, and `hidden`.

    Returns
    -------
    Bundle
        The picture; a line without measured numbers; and a description with the numbers as its alternative text.

    Raises
    ------
    UserError
        There are no rows.
    """
    if not rows:
        raise UserError("no rows to draw; give step_parts() the rows of the job's summary")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    heights = [number + GAP * cases.index(row["case"]) for number, row in enumerate(rows)]

    def paint(axes):
        left = [0.0] * len(rows)
        for part, (label, colour, hatch) in PARTS.items():
            widths = [1000 * row[part] for row in rows]
            look = {"color": colour, "hatch": hatch, "edgecolor": INK, "linewidth": 0.5, "label": label}
            axes.barh(heights, widths, left=left, height=BAR, **look)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        # what is hidden, is hidden behind the backward pass
        ends = [1000 * (row["loading"] + row["forward"] + row["backward"]) for row in rows]
        starts = [max(0.0, end - 1000 * row["hidden"]) for end, row in zip(ends, rows, strict=True)]
        low = [height + BAR / 2 + 0.09 for height in heights]
        widths = [1000 * row["hidden"] for row in rows]
        axes.barh(low, widths, left=starts, height=0.16, color=HIDDEN[1], edgecolor=INK, linewidth=0.5, label=HIDDEN[0])
        axes.set_yticks(heights, [f"{row['case']}, rank {row['rank']}" for row in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel="time in a step (ms)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, fontsize=8)

    figure = draw(paint, width=7.6, height=1.5 + 0.42 * (heights[-1] + 1))
    ranks = len({row["rank"] for row in rows})
    result = bundle(figure, f"the parts of a step of each of {ranks} ranks: {', '.join(cases)}")
    result.metadata["image/png"]["alt"] = "; ".join(_described(row) for row in rows)
    return result


def _described(row) -> str:
    parts = ", ".join(f"{label} {1000 * row[part]:.0f} ms" for part, (label, *_) in PARTS.items())
    return f"{row['case']}, rank {row['rank']}: {parts}, {HIDDEN[0]} {1000 * row['hidden']:.0f} ms"


def own_work(row) -> float:
    """Return the seconds of a step in which a rank did not wait for the others: all but the exposed communication."""
    return sum(row[part] for part in PARTS if part != "exposed")


def straggler(rows) -> str:
    """Say in a sentence which rank the others wait for, if one leads by a tenth of the step, and what takes it so long.

    Parameters
    ----------
    rows : list of dict
        Those of one case; see `step_parts`.
    """
    case, slow = rows[0]["case"], max(rows, key=own_work)
    others = [row for row in rows if row is not slow]
    step = max(own_work(row) + row["exposed"] for row in rows)
    largest = max((part for part in PARTS if part != "other"), key=lambda part: median(row[part] for row in rows))
    mostly = f"the largest part of a step is {PARTS[largest][0]}, {median(r[largest] for r in rows) / step:.0%} of it"
    lead = own_work(slow) - median(own_work(row) for row in others) if others else 0.0
    if lead < LEAST_LEAD * step:
        return f"{case}: no straggler, the ranks' own work differs by {lead / step:.0%} of the step; {mostly}."
    own_parts = (part for part in PARTS if part != "exposed")
    cause = max(own_parts, key=lambda part: slow[part] - median(row[part] for row in others))
    return (
        f"{case}: rank {slow['rank']} is the straggler, its own work takes {1000 * lead:.0f} ms longer than that "
        f"of the others, most of it in: {PARTS[cause][0]}."
    )
