"""The sheet of the diagrams, 100 by `height` units: boxes, arrows, rows of layers and small timelines on it."""

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from mpdemo.notebook.plots.style import IDLE, INK, SKY, STYLE, paler

LAYER = 5.5  # width of a layer's box


class Canvas:
    """A figure without axes; one unit is 0.072 inches, 100 of them the width of the page's text."""

    def __init__(self, height):
        with rc_context(STYLE):
            self.figure = Figure(figsize=(7.2, 0.072 * height))
            self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, 100), ylim=(0, height))
        self.axes.axis("off")

    def text(self, x, y, text, *, size=9, ha="center", va="center", color=INK, **more):
        """Write a text at a point."""
        self.axes.text(x, y, text, fontsize=size, ha=ha, va=va, color=color, **more)

    def frame(self, x, y, width, height, title):
        """Draw a named frame around other things (a node, a process, a device); (x, y) is its lower left corner."""
        self._rounded(x, y, width, height, radius=1, facecolor="white", linewidth=1)
        self.text(x + 1.2, y + height - 1.1, title, ha="left", va="top", weight="bold")

    def box(self, x, y, width, height, text, colour, *, size=8.5):
        """Draw a filled box with a text in it; `x` is its left edge, `y` its middle."""
        self._rounded(x, y - height / 2, width, height, radius=0.6, facecolor=paler(colour), linewidth=0.8)
        self.text(x + width / 2, y, text, size=size)

    def _rounded(self, x, y, width, height, radius, **style):
        shape = f"round,pad=0,rounding_size={radius}"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, shape, edgecolor=INK, **style))

    def arrow(self, start, end, *, colour=INK, both=False, bend=0.0):
        """Draw an arrow between two points."""
        style = {"arrowstyle": "<|-|>" if both else "-|>", "mutation_scale": 11, "color": colour, "linewidth": 1.4}
        self.axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))

    def row(self, x, y, *items):
        """Draw items from left to right at the height `y`; return where the last one ends.

        An item is a box (width, height, text, colour), a range of layer numbers, a text in bold, or a number: the
        length of an arrow.
        """
        for item in items:
            match item:
                case str():
                    self.text(x, y, item, ha="left", weight="bold")
                case range():
                    for layer in item:
                        self.box(x, y, LAYER, 5, f"layer {layer}", SKY, size=7)
                        x += LAYER + 1
                    x -= 1
                case width, height, text, colour:
                    self.box(x, y, width, height, text, colour)
                    x += width
                case length:
                    self.arrow((x + 0.5, y), (x + length - 0.5, y))
                    x += length
        return x

    def timeline(self, x, y, unit, rows, *, row_height=5):
        """Draw what every device does when; hatched is idle.

        `rows` maps a label to its work: a list of (start, length, text, colour), in time units of `unit` sheet units
        each. (x, y) is the lower left corner of the first row.
        """
        width = unit * max(start + length for work in rows.values() for start, length, *_ in work)
        for label, work in rows.items():
            middle = y + row_height / 2
            self.text(x - 1, middle, label, ha="right")
            self.axes.add_patch(Rectangle((x, y), width, row_height, **IDLE, linewidth=0.6))
            for start, length, text, colour in work:
                style = {"facecolor": colour, "edgecolor": INK, "linewidth": 0.7}
                self.axes.add_patch(Rectangle((x + start * unit, y), length * unit, row_height, **style))
                self.text(x + (start + length / 2) * unit, middle, text, size=8)
            y -= row_height + 0.8
        low = y + row_height - 0.4
        self.arrow((x, low), (x + width, low))
        self.text(x + width / 2, low - 1.7, "time", size=8.5)
