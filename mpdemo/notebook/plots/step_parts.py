"""Where the time of a step goes: its parts on every rank (notebooks/08_scaling.ipynb), the buckets of DDP (03_ddp)."""

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
BAR, GAP = 0.56, 0.6  # height of a bar, space between two cases; a rank's row is 1


def step_parts(rows):
    """Draw the parts of every rank's step, and below each bar the communication that is hidden behind them.

    Parameters
    ----------
    rows : list of dict
        `case`, `rank`, and the seconds of each part: `loading`, `forward`, `backward`, `optimizer`, `exposed`,
        `other`, and `hidden`.
    """
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
        look = {"color": paler(style.VERMILLION, 0.7), "label": "communication, hidden"} | EDGE
        axes.barh(low, widths, left=starts, height=0.16, **look)
        name_bars(axes, heights, [f"{row['case']}, rank {row['rank']}" for row in rows])
        axes.set(xlabel="time in a step (ms)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, fontsize=8)

    text = f"the parts of a step of each of {len({row['rank'] for row in rows})} ranks: {', '.join(cases)}"
    return picture(paint, text, None, 7.6, 1.5 + 0.42 * (heights[-1] + 1))


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
