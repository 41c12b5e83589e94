"""The picture of sitting 46: what autograd holds, on two ranks or computed for more."""

from mpdemo.notebook.plots import bars
from mpdemo.notebook.show import Bundle


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
