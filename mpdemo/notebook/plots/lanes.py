"""The timeline as a short SVG text: drawn within milliseconds while a slider moves, in the page's own ink."""

import html

from mpdemo.notebook.plots.style import GREEN, ORANGE, SKY
from mpdemo.timeline import read

COLOURS = {"F": SKY, "B": GREEN, "I": "#7fceb9", "W": ORANGE}  # the input half a paler green
WORDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
LEFT, LANE, GAP = 52, 24, 4  # CSS pixels: room for "rank 0", height of a lane, space between lanes
MOST_NUMBERS = 1500


def lanes(simulation, *, width=880) -> str:
    """Return an inline SVG with one lane a rank; what is left empty is idle.

    Parameters
    ----------
    simulation : mpdemo.plan.Simulation
    width : int
        CSS pixels.
    """
    rows, ranks = simulation.events, simulation.ranks
    scale, pitch = (width - LEFT) / simulation.step_time, LANE + GAP if ranks <= 16 else 10
    height = ranks * pitch + 34
    parts = [_empty(rank, rank * pitch, pitch, width) for rank in range(ranks)]
    for kind, colour in COLOURS.items():
        for later in (False, True):  # a rank's later stages are paler
            boxes = [r for r in rows if r["kind"] == kind and (r["stage"] >= ranks) is later]
            path = "".join(_box(row, scale, pitch) for row in boxes)
            opacity, line = 0.55 if later else 1, 0.5 if len(rows) <= MOST_NUMBERS else 0
            parts.append(
                f'<path d="{path}" fill="{colour}" fill-opacity="{opacity}" stroke="#555" stroke-width="{line}"/>'
            )
    if len(rows) <= MOST_NUMBERS and pitch >= LANE:
        parts += [_number(row, scale, pitch) for row in rows if (row["end"] - row["start"]) * scale > 13]
    parts += _legend(simulation, ranks * pitch + 24)
    idle = f"{simulation.schedule}, {ranks} ranks, {simulation.microbatches} microbatches"
    return (
        f'<svg role="img" aria-label="{html.escape(idle)}: idle {simulation.idle_share:.0%}" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" style="max-width:100%" '
        f'fill="currentColor" font-size="11" font-family="sans-serif">{"".join(parts)}</svg>'
    )


def _empty(rank, y, pitch, width):
    label = f'<text x="{LEFT - 6}" y="{y + pitch / 2 + 2}" text-anchor="end">rank {rank}</text>'
    frame = f'<rect x="{LEFT}" y="{y}" width="{width - LEFT}" height="{pitch - GAP}" fill-opacity=".07"/>'
    return (label if pitch >= LANE or rank % 8 == 0 else "") + frame


def _box(row, scale, pitch):
    x, length = LEFT + row["start"] * scale, (row["end"] - row["start"]) * scale
    return f"M{x:.1f} {row['rank'] * pitch}h{length:.1f}v{pitch - GAP}h{-length:.1f}z" if length else ""


def _number(row, scale, pitch):
    x = LEFT + (row["start"] + row["end"]) / 2 * scale
    y = row["rank"] * pitch + LANE / 2 + 4
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#111">{row["microbatch"]}</text>'


def _legend(simulation, y):
    kinds = [kind for kind in read.COMPUTES if any(row["kind"] == kind for row in simulation.events)]
    for place, kind in enumerate(kinds):
        x = LEFT + 150 * place
        yield f'<rect x="{x}" y="{y - 10}" width="14" height="12" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{x + 20}" y="{y}">{WORDS[kind]}</text>'
