"""A sheet of 100 by `height` units with boxes, arrows and little timelines: what the diagrams are drawn with."""

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from mpdemo.notebook.plots.style import FAINT, GREEN, INK, PAPER, SKY, STYLE

FORWARD, BACKWARD = SKY, GREEN  # the two colours of work in every diagram and timeline


class Canvas:
    """A figure without axes; one unit is 0.072 inches, 100 of them the width of the page's text."""

    def __init__(self, height):
        with rc_context(STYLE):
            self.figure = Figure(figsize=(7.2, 0.072 * height))
            self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, 100), ylim=(0, height))
        self.axes.axis("off")

    def frame(self, x, y, width, height, title, *, dashed=False):
        """Draw a named frame around other things: a node, a process, a device."""
        line = {"linestyle": "--", "edgecolor": FAINT} if dashed else {"edgecolor": INK}
        patch = FancyBboxPatch(
            (x, y), width, height, "round,pad=0,rounding_size=1", facecolor="white", linewidth=1, **line
        )
        self.axes.add_patch(patch)
        self.text(x + 1.2, y + height - 1.1, title, ha="left", va="top", weight="bold")

    def box(self, x, y, width, height, text="", colour=SKY, *, size=8.5):
        """Draw a filled box with a text in it."""
        patch = FancyBboxPatch(
            (x, y),
            width,
            height,
            "round,pad=0,rounding_size=0.6",
            facecolor=colour,
            alpha=0.55,
            edgecolor=INK,
            linewidth=0.8,
        )
        self.axes.add_patch(patch)
        self.text(x + width / 2, y + height / 2, text, size=size)

    def text(self, x, y, text, *, size=9, ha="center", va="center", **more):
        """Write a text at a point."""
        self.axes.text(x, y, text, fontsize=size, ha=ha, va=va, color=more.pop("color", INK), **more)

    def arrow(self, start, end, text="", *, colour=INK, both=False, bend=0.0, at=(0, 1.6)):
        """Draw an arrow between two points, its text beside its middle."""
        style = "<|-|>" if both else "-|>"
        curve = f"arc3,rad={bend}"
        self.axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle=style, mutation_scale=11, color=colour, linewidth=1.4, connectionstyle=curve
            )
        )
        if text:
            self.text((start[0] + end[0]) / 2 + at[0], (start[1] + end[1]) / 2 + at[1], text, size=8.5)

    def model(self, x, y, blocks, colour, *, width=5.5, height=5, first=1):
        """Draw a chain of layers, from left to right; return where it ends."""
        for index in range(blocks):
            self.box(x + index * (width + 1), y, width, height, f"layer {first + index}", colour, size=7)
        return x + blocks * (width + 1) - 1

    def timeline(self, x, y, unit, rows, *, row_height=5):
        """Draw what every device does when.

        `rows` maps a label to its work: a list of (start, length, text, colour), in time units of `unit`
        sheet units each. What is left white is idle.
        """
        end = max(start + length for work in rows.values() for start, length, *_ in work)
        for number, (label, work) in enumerate(rows.items()):
            bottom = y - number * (row_height + 0.8)
            self.text(x - 1, bottom + row_height / 2, label, ha="right")
            idle = Rectangle(
                (x, bottom), end * unit, row_height, facecolor=PAPER, edgecolor=FAINT, hatch="////", linewidth=0.6
            )
            self.axes.add_patch(idle)
            for start, length, text, colour in work:
                place = (x + start * unit, bottom)
                self.axes.add_patch(Rectangle(place, length * unit, row_height, facecolor="white", linewidth=0))
                self.axes.add_patch(
                    Rectangle(
                        place, length * unit, row_height, facecolor=colour, alpha=0.7, edgecolor=INK, linewidth=0.7
                    )
                )
                self.text(place[0] + length * unit / 2, bottom + row_height / 2, text, size=8)
        low = y - (len(rows) - 1) * (row_height + 0.8) - 1.2
        self.arrow((x, low), (x + end * unit, low), "time", at=(0, -1.7))
