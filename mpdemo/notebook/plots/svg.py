"""The loss curve of the live view: inline SVG, drawn within milliseconds, with text in the colour of the page."""

from mpdemo.notebook.plots.style import BLUE

MOST_POINTS = 200  # more points than this are not visible in a curve as wide as the page
WIDTH, HEIGHT, LEFT = 440, 160, 52  # CSS pixels; LEFT is the space for the numbers


def curve(points, last_x=None) -> str:
    """Return the chart of a loss curve.

    Parameters
    ----------
    points : list of (x, y)
        Steps and losses; at least one.
    last_x : float, optional
        Where the axis ends: the number of steps to come; the last point's x otherwise.
    """
    points = [*points[: -1 : max(1, len(points) // MOST_POINTS)], points[-1]]
    right, top, bottom = WIDTH - 10, 22, HEIGHT - 24
    end = max(last_x or 0, points[-1][0]) or 1
    low, high = min(y for _, y in points), max(y for _, y in points)
    height = high - low or 1

    def place(x, y):
        return LEFT + (right - LEFT) * x / end, bottom - (bottom - top) * (y - low) / height

    parts = [
        f'<text x="{LEFT}" y="12">loss</text><text x="{LEFT}" y="{HEIGHT - 8}">0</text>'
        f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">step {end}</text>'
    ]
    for value in (low, low + height / 2, low + height):
        y = place(0, value)[1]
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{right}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
    x, y = place(*points[-1])
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{BLUE}"/>'
    )
    return (
        f'<svg role="img" aria-label="loss {points[-1][1]:.4g} at step {points[-1][0]}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" style="max-width:100%" '
        f'fill="currentColor" font-size="11" font-family="sans-serif">{"".join(parts)}</svg>'
    )
