"""The pictures of notebooks/02_data_parallel.ipynb: star against ring, and the loss of larger batches."""

from math import cos, pi, sin

from mpdemo.notebook.plots import curves, style
from mpdemo.notebook.plots.timeline import MESSAGES

__all__ = ["curves", "star_and_ring"]
TRAFFIC = MESSAGES["A"][1]  # as an all-reduce in the timelines


def star_and_ring(through):
    """Draw who sends to whom among eight devices, and what passes through the busiest one.

    `through` has for "star" and "ring" the MiB that the busiest device sends and receives, by the number of devices.
    """

    def paint(figure, panels):
        around = [(sin(2 * pi * n / 8), cos(2 * pi * n / 8)) for n in range(8)]
        centre = [(0, 0)] + [(sin(2 * pi * n / 7), cos(2 * pi * n / 7)) for n in range(7)]
        _network(panels[0], "star: all through device 0", centre, [(0, n) for n in range(1, 8)], "<->")
        _network(panels[1], "ring: each to its neighbour", around, [(n, (n + 1) % 8) for n in range(8)], "->")
        for index, (name, row) in enumerate(through.items()):  # both are traffic: two dashes, one colour
            panels[2].plot(list(row), list(row.values()), "s--" if index else "o-", color=TRAFFIC, markersize=4)
            end = list(row.items())[-1]
            panels[2].annotate(name, end, (5, 0), textcoords="offset points", va="center")
        panels[2].set_xscale("log", base=2)
        panels[2].set_xticks(list(row), [f"{n}" for n in row])
        panels[2].set(xlabel="devices", ylabel="MiB per step", xlim=(None, 2.1 * max(row)), ylim=(0, None))
        panels[2].set_title("through the busiest device", fontsize=10)

    alt = "; ".join(
        f"{name}: " + ", ".join(f"{n} devices {mib:.0f} MiB" for n, mib in row.items()) for name, row in through.items()
    )
    text = "a star and a ring of eight devices, and the traffic of the busiest device"
    return style.picture(paint, text, alt, 8.6, 2.7, 1, 3)


def _network(axes, title, places, links, arrow):
    """Draw devices as numbered circles, and an arrow for each link."""
    for one, other in links:
        look = {"arrowstyle": arrow, "color": TRAFFIC, "linewidth": 1.3, "shrinkA": 11, "shrinkB": 11}
        axes.annotate("", places[other], places[one], arrowprops=look)
    for number, (x, y) in enumerate(places):
        circle = {"boxstyle": "circle,pad=0.35", "facecolor": "white", **style.EDGE}
        axes.text(x, y, f"{number}", ha="center", va="center", fontsize=9, bbox=circle)
    axes.set(xlim=(-1.4, 1.4), ylim=(-1.35, 1.35), aspect="equal")
    axes.set_title(title, fontsize=10)
    axes.axis("off")
