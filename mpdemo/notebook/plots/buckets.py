"""DDP's all-reduce beside the backward pass that it hides behind: the idea, and a step as it was measured."""

from mpdemo.notebook.plots.canvas import BACKWARD, FORWARD, Canvas
from mpdemo.notebook.plots.style import BLUE, GREEN, INK, SKY, VERMILLION, bundle, draw


def idea() -> Canvas:
    """Draw one process's step twice: all gradients averaged at the end, and bucket by bucket on the way."""
    sheet = Canvas(47)
    backward = [(6 + 2 * i, 2, f"B{6 - i}", BACKWARD) for i in range(6)]
    compute = [(0, 6, "forward", FORWARD), *backward]
    late = [(18, 6, "all-reduce of all", VERMILLION)]
    early = [(10, 2, "1", VERMILLION), (14, 2, "2", VERMILLION), (18, 2, "3", VERMILLION)]
    for y, title, network in ((34, "one after the other: 24 ticks", late), (11, "in buckets, overlapped: 20", early)):
        sheet.text(14, y + 8, title, ha="left", weight="bold")
        end = max(start + length for start, length, *_ in network)
        rows = {"compute": compute, "network": network}
        sheet.timeline(14, y, 2.9, {name: [*work, (end, 0, "", FORWARD)] for name, work in rows.items()})
    sheet.text(92, 35, "B6: backward\nof layer 6, the\nfirst that is\nready", size=8.5)
    sheet.text(86, 11, "bucket 1: layers 6, 5\nbucket 2: layers 4, 3\nbucket 3: layers 2, 1", size=8.5)
    return sheet


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

    def paint(axes):
        for height, (_, start, end, colour) in enumerate(lanes):
            axes.barh(height, end - start, left=start, height=0.62, color=colour, edgecolor=INK, linewidth=0.5)
        axes.axvline(last, color=VERMILLION, linestyle="--", linewidth=1.5, label="the last gradient is ready")
        axes.set_yticks(range(len(lanes)), [name for name, *_ in lanes])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel="time since the step began (s)", xlim=(0, max(step["backward"], rows[-1]["reduced"]) * 1.03))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18))

    figure = draw(paint, width=7.2, height=1.3 + 0.36 * len(lanes))
    return bundle(figure, f"one step of DDP: forward, backward and the all-reduce of {len(rows)} buckets")
