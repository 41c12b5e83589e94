"""The look of every figure: colours that colour-blind readers can tell apart, on a light or a dark page.

Figures are made without pyplot: no global state, no choice of a backend, nothing to close. The background is opaque, so
the text keeps its contrast on every page.
"""

import base64
import io

from matplotlib import rc_context
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from mpdemo.notebook.show import Bundle

# Okabe and Ito, "Color Universal Design" (2008): distinct with every common form of colour blindness.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, YELLOW = "#CC79A7", "#56B4E9", "#000000", "#F0E442"
CYCLE = [BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK]
DASHES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2))]

INK, FAINT, PAPER = "#222222", "#8a8a8a", "#fbfaf7"
EDGE = {"edgecolor": INK, "linewidth": 0.5}  # of a box
PIXELS = 100  # CSS pixels per inch on the page
DENSITY = 1.6  # picture points per CSS pixel, so that the text is sharp on dense screens

STYLE = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "font.size": 10,
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
}


def paler(colour, share=0.55) -> str:
    """Return `share` of a colour mixed with white; opaque, so it is the same on a light and a dark page."""
    return to_hex([1 - share * (1 - channel) for channel in to_rgb(colour)])


def line_style(index) -> dict:
    """Return colour and dashes of the curve number `index`: curves differ in both."""
    return {"color": CYCLE[index % len(CYCLE)], "linestyle": DASHES[index % len(DASHES)]}


def picture(paint, text, alt=None, width=6.4, height=3.2, rows=1, columns=1, **grid) -> Bundle:
    """Return a figure as something to display: a PNG, one line that describes it, and numbers in its `alt` text only.

    ``paint(figure, axes)`` draws it; its size is in inches of 100 CSS pixels, and `grid` are words of Figure.subplots.
    `text` holds no measured numbers, because the notebooks' test compares it; it is the alt text by default. The result
    keeps the matplotlib figure as its attribute `figure`.
    """
    buffer, small = io.BytesIO(), io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure, figure.subplots(rows, columns, **grid))
        # without the version in the metadata, which would make equal pictures differ
        figure.savefig(buffer, format="png", dpi=PIXELS * DENSITY, metadata={"Software": None})
    # a third of the bytes
    Image.open(buffer).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    about = {"width": round(width * PIXELS), "alt": alt or text}
    result = Bundle(text, about, png=base64.b64encode(small.getvalue()).decode())
    result.figure = figure
    return result


def patches(looks, **more) -> list:
    """Return a legend's patches; `looks` are pairs (label, words of a matplotlib Patch)."""
    return [Patch(label=label, **look, **more) for label, look in looks]


def stack(axes, heights, parts, height=0.6):
    """Draw horizontal bars of parts beside each other; `parts` are pairs (widths, look). Return the last ones."""
    left = [0.0] * len(heights)
    for widths, look in parts:
        bars = axes.barh(heights, widths, left=left, height=height, **look)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    return bars


def name_bars(axes, heights, labels):
    """Name horizontal bars, the first one on top."""
    axes.set_yticks(heights, labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
