"""The live loss curve: a short SVG text that takes the page's own ink, so it fits light and dark themes."""

import html

from mpdemo.notebook.plots.style import BLUE

MOST_POINTS = 200  # a curve as wide as the page cannot show more


def curve(points, *, last_x=None, label="loss", width=440, height=160) -> str:
    """Return an inline SVG of one curve.

    Parameters
    ----------
    points : list of (x, y)
        Steps and values; at least one.
    last_x : float, optional
        Where the axis ends: the number of steps to come; the last point's x otherwise.
    label : str
        What y is; written on the chart and read out by screen readers.
    width, height : int
        Size in CSS pixels.
    """
    step = max(1, len(points) // MOST_POINTS)
    points = [*points[:-1:step], points[-1]]
    left, right, top, bottom = 48, width - 10, 22, height - 24
    end = max(last_x or 0, points[-1][0]) or 1
    values = [y for _, y in points]
    low, high = min(values), max(values)
    high = high if high > low else low + 1

    def place(x, y):
        return left + (right - left) * x / end, top + (bottom - top) * (high - y) / (high - low)

    lines = "".join(_level(value, place(0, value)[1], left, right) for value in (low, (low + high) / 2, high))
    path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
    x, y = place(*points[-1])
    says = html.escape(f"{label} {points[-1][1]:.4g} at step {points[-1][0]}", quote=True)
    return (
        f'<svg role="img" aria-label="{says}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="max-width:100%" fill="currentColor" font-size="11" font-family="sans-serif">'
        f'<text x="{left}" y="12">{html.escape(label)}</text>{lines}'
        f'<text x="{left}" y="{height - 8}">0</text>'
        f'<text x="{right}" y="{height - 8}" text-anchor="end">step {end}</text>'
        f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{BLUE}"/></svg>'
    )


def _level(value, y, left, right) -> str:
    """A pale horizontal line with its value."""
    return (
        f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity=".15"/>'
        f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    )
