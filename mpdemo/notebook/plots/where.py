"""Which tensor lives where: the same drawing for every method, with the ranks as columns."""

from matplotlib.patches import Rectangle

from mpdemo.errors import UserError
from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.style import EDGE, paler, patches, picture
from mpdemo.notebook.show import Bundle

TENSORS = {  # name: height of its box, colour
    "weights": (1.0, paler(style.SKY, 0.85)),
    "gradients": (1.0, paler(style.GREEN, 0.85)),
    "optimizer states": (2.0, paler(style.ORANGE, 0.85)),  # AdamW keeps two numbers for each weight
    "activations": (1.0, paler(style.PURPLE, 0.85)),
}
COPY = ("all", "a copy", "")
SLICE = ("slice", "a slice of each layer", "")
GATHERED = ("slice", "a slice of each layer", "all of the layer\nthat computes")
REDUCED = ("slice", "a slice of each layer", "all of a layer, until\nthe ranks have added it up")
SAMPLES = ("slice", "of its samples", "")
METHODS = {  # for each tensor: the shape of what is stored, its name, what is there for a moment
    "DDP": (COPY, COPY, COPY, SAMPLES),
    "FSDP": (GATHERED, REDUCED, SLICE, SAMPLES),
    "TP": (SLICE, SLICE, SLICE, ("between", "of all samples: its slice,\nbetween layers all of it", "")),
}  # fmt: skip
APART = 1.15  # distance of two columns


def where(method: str, ranks: int = 4) -> Bundle:
    """Draw which part of weights, gradients, optimizer states and activations each rank has.

    A box is all of one kind of tensor, its layers from top to bottom. What a rank stores is filled; what it has only
    for a moment is hatched, in the second layer.

    Parameters
    ----------
    method : str
        A name of `METHODS`: ``"DDP"``, ``"FSDP"``.
    ranks : int
        How many, from 2 to 8.
    """
    if method not in METHODS:
        raise UserError(f"no method {method!r}; there are: {', '.join(METHODS)}")
    if ranks not in range(2, 9):
        raise UserError(f"{ranks!r} ranks cannot be drawn; allowed: 2 to 8")
    rows = dict(zip(TENSORS, METHODS[method], strict=True))

    def paint(figure, axes):
        top = 0.0
        for name, (shape, words, moment) in rows.items():
            height, colour = TENSORS[name]
            for rank in range(ranks):
                _box(axes, (APART * rank, top, height), stored(shape, rank, ranks), colour, ranks, bool(moment))
            axes.text(-0.15, top + height / 2, name, ha="right", va="center")
            text = "\n+ ".join(filter(None, (words, moment)))
            axes.text(APART * ranks, top + height / 2, text, va="center", fontsize=8)
            top += height + 0.2
        for rank in range(ranks):
            axes.text(APART * rank + 0.5, -0.1, f"rank {rank}", ha="center", va="bottom", fontsize=9)
        axes.set(xlim=(-1.6, APART * ranks + 1.9), ylim=(top, -0.7), title=method)
        axes.set_axis_off()
        looks = {"stored": {"facecolor": "#aaaaaa"}, "only for a moment": {"facecolor": "white", "hatch": "////"}}
        figure.legend(handles=patches(looks.items(), **EDGE), loc="outside lower center", ncols=2)

    said = "; ".join(" + ".join(filter(None, (name + ": " + row[1], row[2]))) for name, row in rows.items())
    told = f"what each of {ranks} ranks has with {method}. {said}".replace("\n", " ")
    return picture(paint, told, None, 0.8 * (ranks + 4.2), 5.0)


def stored(shape: str, rank: int, ranks: int) -> list[tuple[float, float, float, float]]:
    """Return what a rank stores of one kind of tensor, as parts (from layer, to layer, from, to) from 0 to 1."""
    own = rank / ranks, (rank + 1) / ranks
    layers = layers_of(ranks)
    strips = [((k + 0.75) / layers, (k + 1) / layers, 0.0, 1.0) for k in range(layers)]
    parts = {
        "all": [(0, 1, 0, 1)],
        "slice": [(0, 1, *own)],
        "between": [(0, 1, *own), *strips],
    }
    return parts[shape]


def layers_of(ranks: int) -> int:
    """Return how many layers are drawn, so that each rank can have as many."""
    return ranks if ranks > 2 else 4


def _box(axes, place, parts, colour, ranks, moment):
    """Paint one rank's box at a place (left, top, height)."""
    left, top, height = place
    layers = layers_of(ranks)

    def rectangle(first, last, start, end, **look):
        corner = left + start, top + first * height
        axes.add_patch(Rectangle(corner, end - start, (last - first) * height, **look))

    rectangle(0, 1, 0, 1, facecolor="white")
    if moment:
        rectangle(1 / layers, 2 / layers, 0, 1, facecolor="white", edgecolor=style.INK, hatch="//////", linewidth=0)
    for part in parts:
        rectangle(*part, facecolor=colour)
    for layer in range(layers):
        rectangle(layer / layers, (layer + 1) / layers, 0, 1, fill=False, edgecolor=style.FAINT, linewidth=0.5)
    rectangle(0, 1, 0, 1, fill=False, edgecolor=style.INK, linewidth=1)
