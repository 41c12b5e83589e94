"""One look for every figure: colours that colour-blind readers tell apart, on a page that is light or dark.

Figures are made without pyplot: no global state, no choice of a backend, nothing to close. The background is
opaque, so that the text keeps its contrast whatever the page behind it.
"""

import base64
import io

from matplotlib import rc_context
from matplotlib.figure import Figure

from mpdemo.notebook.bundle import Bundle

# Okabe and Ito, "Color Universal Design" (2008): told apart with every common form of colour blindness.
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#F0E442", "#000000"
CYCLE = [BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK]
DASHES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2))]

INK, FAINT, PAPER = "#222222", "#8a8a8a", "#fbfaf7"
PIXELS = 100  # CSS pixels an inch on the page
DENSITY = 1.6  # picture points a CSS pixel, so that the text is sharp on dense screens

STYLE = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
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


def draw(paint, width=6.4, height=3.2) -> Figure:
    """Return a figure with one pair of axes, painted by ``paint(axes)`` in the package's style.

    Parameters
    ----------
    paint : callable
        Called with the matplotlib ``Axes``.
    width, height : float
        Size in inches, at 100 CSS pixels an inch.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure.add_subplot())
    return figure


def bundle(figure, text) -> Bundle:
    """Return `figure` as something to display: the picture, and one line that says what it shows.

    `text` must not hold measured numbers: the notebooks' test compares it. The matplotlib figure stays at hand
    as `figure`.
    """
    shown = Bundle(text, png=base64.b64encode(png(figure)).decode(), width=round(figure.get_figwidth() * PIXELS))
    shown.figure = figure
    return shown


def png(figure) -> bytes:
    """Return the figure as PNG bytes, without the date and the version that would make two runs differ."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=PIXELS * DENSITY, metadata={"Software": None})
    return buffer.getvalue()


def looks(index) -> dict:
    """Return colour and line style of the curve number `index`: told apart by the dashes too."""
    return {"color": CYCLE[index % len(CYCLE)], "linestyle": DASHES[index % len(DASHES)]}
