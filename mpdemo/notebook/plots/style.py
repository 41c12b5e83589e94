"""The look of every figure: colours that colour-blind readers can distinguish, on a light or a dark page.

Figures are made without pyplot: no global state, no choice of a backend, nothing to close. The background is
opaque, so the text keeps its contrast on every page.
"""

import base64
import io

from matplotlib import rc_context
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from PIL import Image

from mpdemo.notebook.bundle import Bundle

# Okabe and Ito, "Color Universal Design" (2008): distinct with every common form of colour blindness.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, YELLOW = "#CC79A7", "#56B4E9", "#000000", "#F0E442"
CYCLE = [BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK]
DASHES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2))]

INK, FAINT, PAPER = "#222222", "#8a8a8a", "#fbfaf7"
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


# Each kind of operation in a timeline: its name in the legend, its colour.
OPERATIONS = {
    "F": ("forward", paler(SKY, 0.85)),
    "B": ("backward", paler(GREEN, 0.85)),
    "I": ("backward, input", paler(GREEN, 0.6)),
    "W": ("backward, weights", paler(ORANGE, 0.85)),
    "O": ("optimizer", paler(PURPLE, 0.85)),
}
MESSAGES = {
    "A": ("all-reduce", paler(VERMILLION, 0.7)),
    "G": ("all-gather", YELLOW),
    "R": ("reduce-scatter", paler(BLUE, 0.8)),
}
IDLE = {"facecolor": PAPER, "edgecolor": FAINT, "hatch": "////"}


def group_operations(rows, ranks):
    """Yield (colour, rows) for each kind of operation; those of a rank's second and later stages are paler.

    `rows` are those of a timeline (`mpdemo.timeline.read`); with P ranks, stage P and all above are later stages.
    """
    for kind, (_, colour) in OPERATIONS.items():
        for later in (False, True):
            group = [row for row in rows if row["kind"] == kind and (row["stage"] >= ranks) is later]
            yield paler(colour) if later else colour, group


def draw(paint, width=6.4, height=3.2) -> Figure:
    """Return a figure with one pair of axes, painted by ``paint(axes)`` in the package's style.

    Parameters
    ----------
    paint : callable
        Called with the matplotlib ``Axes``.
    width, height : float
        Inches, at 100 CSS pixels per inch.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure.add_subplot())
    return figure


def bundle(figure, text) -> Bundle:
    """Return `figure` as something to display: the picture as PNG, and one line that describes it.

    `text` must not hold measured numbers: the notebooks' test compares it. The result keeps the matplotlib figure
    as its attribute `figure`.
    """
    buffer = io.BytesIO()
    with rc_context(STYLE):  # without the version in the metadata, which would make equal pictures differ
        figure.savefig(buffer, format="png", dpi=PIXELS * DENSITY, metadata={"Software": None})
    small = io.BytesIO()
    Image.open(buffer).convert("RGB").quantize(128).save(small, format="png", optimize=True)  # a third of the bytes
    picture = base64.b64encode(small.getvalue()).decode()
    result = Bundle(text, png=picture, width=round(figure.get_figwidth() * PIXELS))
    result.figure = figure
    return result


def line_style(index) -> dict:
    """Return colour and dashes of the curve number `index`: curves differ in both."""
    return {"color": CYCLE[index % len(CYCLE)], "linestyle": DASHES[index % len(DASHES)]}
