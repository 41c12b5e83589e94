"""The pictures of sitting 21: a step of DDP, and when it sends."""

from mpdemo.notebook.plots import style
from mpdemo.notebook.plots.timeline import MESSAGES, OPERATIONS

__all__ = ["lanes", "step"]
OWN = ["#e8d3ae", "#bdb2e0"]  # by rank: what only it has; white is what both have
ALL_REDUCE = MESSAGES["A"][1]  # as in the timelines


def step(weight, inputs, gradients, mean, lr):
    """Draw one step in four small pictures; `inputs` and `gradients` hold one entry per rank."""

    def paint(figure, panels):
        def box(panel, rank, text, colour="white", x=0.5):
            look = {"boxstyle": "round,pad=0.25,rounding_size=0.1", "facecolor": colour, **style.EDGE}
            panels[panel].text(x, 0.72 - 0.5 * rank, text, ha="center", va="center", bbox=look)

        titles = "1. equal weights", "2. its own inputs", "3. gradients, averaged", "4. equal update"
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title, fontsize=10)
            axes.axis("off")
        for rank, colour in enumerate(OWN):
            panels[0].text(-0.05, 0.72 - 0.5 * rank, f"rank {rank}", ha="right", va="center")
            box(0, rank, f"w = {weight:g}")
            box(1, rank, "x = " + ", ".join(f"{x:g}" for x in inputs[rank]), colour)
            box(2, rank, f"{gradients[rank]:g}", colour, x=0.2)
            box(2, rank, f"{mean:g}", x=0.85)
            box(3, rank, f"w = {weight:g} + {-lr * mean:g}\n= {weight - lr * mean:g}")
            arrow = {"arrowstyle": "->", "color": ALL_REDUCE, "linewidth": 1.5}
            for to in 0, 1:
                start, end = (0.34, 0.72 - 0.5 * rank), (0.71, 0.72 - 0.5 * to)
                panels[2].annotate("", end, start, arrowprops=arrow)
        panels[2].text(0.52, 0, "all-reduce", ha="center", va="center", color=ALL_REDUCE, fontsize=9)

    alt = (
        f"Both ranks begin with weight {weight:g}. Rank 0 takes {inputs[0]} and gets the gradient {gradients[0]:g}, "
        f"rank 1 takes {inputs[1]} and gets {gradients[1]:g}. The all-reduce leaves the mean {mean:g} on both, "
        f"so both end with the weight {weight - lr * mean:g}."
    )
    return style.picture(paint, "one step of DDP on two ranks, in four pictures", alt, 8.6, 1.8, 1, 4)


def lanes(buckets, overlap=False, latency=1.2, each=0.4):
    """Draw one rank's backward pass, a unit for each layer, and an all-reduce for each bucket, a list of layers.

    An all-reduce takes the latency, and `each` for each layer. With overlap it begins when its layers are computed.
    """
    layers, free, sent = sum(map(len, buckets)), 0.0, []
    for bucket in buckets:
        begin = max(free, layers - min(bucket) if overlap else layers)
        free = begin + latency + each * len(bucket)
        sent.append((", ".join(map(str, bucket)), begin, free - begin))
    computed = [(str(layer), layers - 1 - layer, 1) for layer in reversed(range(layers))]

    def paint(figure, axes):
        for lane, (boxes, colour) in enumerate(((computed, OPERATIONS["B"][1]), (sent, ALL_REDUCE))):
            for name, start, length in boxes:
                axes.barh(lane, length, left=start, height=0.75, color=colour, **style.EDGE)
                axes.text(start + length / 2, lane, name, ha="center", va="center", fontsize=9)
        axes.set(xlim=(0, 16), xlabel="units of time")
        style.name_bars(axes, (0, 1), ["backward pass", "all-reduce"])

    told = "; ".join(f"layers {name} from {start:g} to {start + length:g}" for name, start, length in sent)
    alt = f"The backward pass ends after {layers} units. All-reduces: {told}."
    return style.picture(paint, "the backward pass of one rank and its all-reduces", alt, 8.0, 1.6)
