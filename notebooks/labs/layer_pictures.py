"""Pictures for notebooks 08 and 46: what autograd holds, and two layers of which each rank computes half."""

from matplotlib.patches import Rectangle

from mpdemo.notebook.plots import bars, style
from mpdemo.notebook.plots.style import EDGE, paler, patches, picture
from mpdemo.notebook.show import Bundle

LOOKS = [  # of what is whole on both ranks, and of each rank's part
    {"facecolor": "#dddddd"},
    {"facecolor": paler(style.SKY, 0.85)},
    {"facecolor": paler(style.ORANGE, 0.85), "hatch": "////"},
]
MATRICES = [  # name, split into (columns, rows), sign after it
    ("x", (1, 1), "@"),
    ("up.T, by columns", (2, 1), "="),
    ("hidden", (2, 1), "@"),
    ("down.T, by rows", (1, 2), "="),
]


def held(result, *ways) -> Bundle:
    """Draw what autograd holds by layer, as microscope.py has counted it; ranks apart where they differ."""
    rows = {}
    for way in ways or result:
        ranks = result[way] if result[way][0] != result[way][1] else result[way][:1]
        for rank, sizes in enumerate(ranks):
            name = f"{way}, rank {rank}" if ranks[1:] else way
            rows[name] = {layer: size / 2**20 for layer, size in sizes.items()}
    return bars(rows, "MiB that autograd holds at the peak", digits=1)


def on_ranks(result, ranks, *ways) -> dict:
    """Return what `held` draws for more ranks than the two of microscope.py: each part of a rank is whole or split.

    So it's kept + split / ranks, and kept + split is one device's. A device that works alone stays as it is.
    """
    (one, *_), alone = result["one device"], ("one device", "recomputation")

    def of_rank(layer, size):
        kept, split = 2 * size - one[layer], 2 * (one[layer] - size)
        return kept + split / ranks

    return {
        way: result[way]
        if way in alone
        else 2 * [{layer: of_rank(layer, size) for layer, size in result[way][0].items()}]
        for way in ways
    }


def columns_then_rows() -> Bundle:
    """Draw x @ up.T @ down.T, with what each of two ranks stores and computes."""

    def paint(figure, axes):
        for place, (name, parts, sign) in enumerate(MATRICES):
            _matrix(axes, 1.5 * place, name, parts)
            axes.text(1.5 * place + 1.25, 0.5, sign, ha="center", va="center", fontsize=14)
        left = 1.5 * len(MATRICES)
        for rank in (0, 1):
            axes.add_patch(Rectangle((left + 1.3 * rank, 0), 1, 1, **EDGE, **LOOKS[1 + rank]))
        axes.text(left + 1.15, 0.5, "+", ha="center", va="center", fontsize=14)
        axes.text(left + 1.15, -0.12, "partial sums: all-reduce", ha="center")
        axes.set(xlim=(-0.1, left + 2.4), ylim=(1.1, -0.3), aspect="equal")
        axes.set_axis_off()
        names = ["the same on both ranks", "rank 0", "rank 1"]
        looks = patches(zip(names, LOOKS, strict=True), **EDGE)
        figure.legend(handles=looks, loc="outside lower center", ncols=3)

    text = (
        "x, whole on both ranks, times up.T, of which each rank has half of the columns, is hidden, of which each rank "
        "has the same columns; times down.T, of which each rank has half of the rows, it gives two partial sums, "
        "which an all-reduce adds up"
    )
    return picture(paint, text, None, 8.0, 2.2)


def _matrix(axes, left, name, parts):
    """Paint a matrix, whole or in two parts beside or below each other."""
    columns, rows = parts
    for number in range(columns * rows):
        corner = left + number * (columns > 1) / columns, number * (rows > 1) / rows
        look = LOOKS[0 if columns == rows == 1 else 1 + number]
        axes.add_patch(Rectangle(corner, 1 / columns, 1 / rows, **EDGE, **look))
    axes.text(left + 0.5, -0.12, name, ha="center")
