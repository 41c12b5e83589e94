"""A ring all-reduce in steps: which ranks' numbers each chunk of each rank holds."""

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mpdemo.notebook.plots.style import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, PURPLE, SKY, STYLE, bundle, paler

COLOURS = [paler(colour, 0.8) for colour in (BLUE, ORANGE, GREEN, PURPLE, SKY)]
ROW, CHUNK = 0.7, 0.86  # height of a rank's row and width of a chunk, of 1


def ring(steps):
    """Draw the chunks of every rank before the first step and after each one.

    Parameters
    ----------
    steps : list
        Of tables: ``table[rank][chunk]`` is the set of ranks whose numbers are in this chunk's sum. A chunk is a frame
        with one place per rank, which is filled when that rank's numbers are in it; what a step changed has a thick
        frame.

    Returns
    -------
    Bundle
        The picture, and a line that says how full the chunks are after each step.
    """
    ranks, columns = len(steps[0]), -(-len(steps) // 2)
    with rc_context(STYLE):
        sheet = Figure(figsize=(8.6, 2 * (0.55 + 0.3 * ranks)), layout="constrained")
        grid = sheet.subplots(2, columns, squeeze=False).ravel()
        for number, axes in enumerate(grid):
            axes.axis("off")
            if number < len(steps):
                paint_table(axes, steps[number], steps[max(0, number - 1)])
                axes.set_title(f"after step {number}" if number else "before", fontsize=10)
    fullest = [max(len(chunk) for row in table for chunk in row) for table in steps]
    full = [sum(len(chunk) == ranks for row in table for chunk in row) for table in steps]
    result = bundle(sheet, f"ring of {ranks} ranks, complete chunks before and after each step: {full}")
    result.metadata["image/png"]["alt"] = (
        f"The chunks of {ranks} ranks. Before and after each step, the fullest chunk holds the numbers of "
        f"{', '.join(map(str, fullest))} ranks, and {', '.join(map(str, full))} chunks are complete."
    )
    return result


def paint_table(axes, table, before):
    """Draw one row of chunks for each rank."""
    ranks = len(table)
    for rank, row in enumerate(table):
        axes.text(-0.15, rank + ROW / 2, f"rank {rank}", ha="right", va="center", fontsize=8)
        for number, chunk in enumerate(row):
            for source in chunk:
                place = number + source * CHUNK / ranks, rank
                axes.add_patch(Rectangle(place, CHUNK / ranks, ROW, facecolor=COLOURS[source % len(COLOURS)]))
            changed = chunk != before[rank][number]
            style = {"edgecolor": INK, "linewidth": 2.2} if changed else {"edgecolor": FAINT, "linewidth": 0.8}
            axes.add_patch(Rectangle((number, rank), CHUNK, ROW, fill=False, **style))
    axes.set(xlim=(-1.1, len(table[0])), ylim=(ranks, -0.1), facecolor=PAPER)
