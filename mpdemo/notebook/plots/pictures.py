"""The opening picture of each notebook: where the data, the layers and the gradients are on that rung."""

from mpdemo.errors import UserError
from mpdemo.notebook.plots.buckets import idea
from mpdemo.notebook.plots.canvas import BACKWARD, FORWARD, Canvas
from mpdemo.notebook.plots.style import BLUE, ORANGE, PURPLE, VERMILLION, bundle


def picture(name):
    """Draw the opening diagram of a rung.

    Parameters
    ----------
    name : str
        ``"where_am_i"``, ``"buckets"`` or a rung: ``"single"``, ``"data_parallel"``, ``"ddp"``, ``"model_parallel"``,
        ``"pipeline"``.

    Returns
    -------
    Bundle
        The picture, and a sentence that says the same.
    """
    if name not in PICTURES:
        raise UserError(f"no picture {name!r}; there are: {', '.join(PICTURES)}")
    paint, sentence = PICTURES[name]
    return bundle(paint().figure, f"picture: {sentence}")


def _where_am_i():
    sheet = Canvas(38)
    for node in (0, 1):
        left = 2 + 49 * node
        sheet.frame(left, 7, 47, 30, f"node {node}  (one computer)")
        for local in (0, 1):
            x = left + 2 + 22 * local
            sheet.frame(x, 9, 21, 23, "process")
            sheet.box(x + 1.5, 22, 18, 4.6, f"RANK = {2 * node + local}", ORANGE)
            sheet.box(x + 1.5, 16.5, 18, 4.6, f"LOCAL_RANK = {local}", FORWARD)
            sheet.box(x + 1.5, 11, 18, 4.6, f"device {local} of this node", BACKWARD)
    sheet.text(50, 3.5, "WORLD_SIZE = 4 = 2 nodes x 2 processes a node;   every process runs the same file")
    return sheet


def _single():
    sheet = Canvas(24)
    sheet.frame(20, 3, 60, 19, "one process, one device")
    sheet.box(2, 8, 11, 8, "batch\n128 images", ORANGE)
    sheet.arrow((13.5, 12), (22.5, 12))
    end = sheet.model(23, 9.5, 6, FORWARD)
    sheet.arrow((end + 0.5, 12), (end + 7.5, 12))
    sheet.text(end + 10.5, 12, "loss", weight="bold")
    sheet.arrow((end + 10, 10), (24, 8.7), "", colour=BLUE, bend=-0.12)
    sheet.text(50, 4.8, "backward: a gradient for every weight, then the optimizer's step", size=8.5, color=BLUE)
    sheet.text(42, 17, "forward", size=8.5)
    sheet.text(90, 12, "the reference:\nevery other rung\nmust train the same", size=8.5)
    return sheet


def _data_parallel():
    sheet = Canvas(34)
    sheet.frame(16, 1, 82.5, 32, "one process, a thread a device")
    sheet.box(1, 12, 13, 8, "batch\n128 images", ORANGE)
    for device, y in ((0, 17), (1, 3)):
        sheet.frame(38, y, 36, 12, f"device {device}: a copy of the model")
        sheet.model(40, y + 2, 5, FORWARD, width=5.3)
        sheet.box(24, y + 2, 9, 5, "64 images", ORANGE)
        sheet.arrow((14.5, 16), (23.5, y + 4.5))
        sheet.arrow((33.5, y + 4.5), (39.5, y + 4.5))
        sheet.arrow((72.5, y + 4.5), (82.5, 16 + (1 - device) * 1.5))
    sheet.text(24, 26.5, "scatter", size=8.5)
    sheet.box(83, 12, 12, 8, "loss\non device 0", PURPLE)
    sheet.text(89, 22, "gather", size=8.5)
    sheet.text(89, 6, "copies are made\nanew every step;\ngradients summed\non device 0", size=8)
    return sheet


def _ddp():
    sheet = Canvas(34)
    sheet.box(1, 13, 10, 8, "batch\n128 images", ORANGE)
    for rank, y in ((0, 18.5), (1, 1)):
        sheet.frame(24, y, 60, 14.5, f"process, rank {rank}, device {rank}: the whole model")
        sheet.box(12.8, y + 2.5, 9, 6, "64 images", ORANGE)
        sheet.arrow((6, 12.5 if rank else 21.5), (12.5, y + 5.5), bend=0.25 if rank else -0.25)
        sheet.arrow((22, y + 5.5), (25.5, y + 5.5))
        end = sheet.model(26, y + 3, 5, FORWARD, width=5.6)
        sheet.arrow((end + 0.5, y + 5.5), (end + 5.5, y + 5.5))
        sheet.box(end + 6, y + 2.5, 14, 6, "gradients", BACKWARD)
    sheet.arrow((71, 9.8), (71, 20.8), both=True, colour=VERMILLION)
    sheet.text(69.5, 17, "all-reduce: the mean of all", size=8.5, ha="right", color=VERMILLION)
    sheet.text(92.5, 17, "same mean,\nsame step,\nsame weights\nin every\nprocess", size=8.5)
    return sheet


def _cut(sheet, top):
    """Draw a model of six layers, cut over two devices."""
    sheet.box(1, top, 11, 7, "batch\n128 images", ORANGE)
    sheet.frame(16, top - 2.5, 31, 13, "device 0")
    sheet.frame(58, top - 2.5, 31, 13, "device 1")
    end = sheet.model(18.5, top, 3, FORWARD, width=8)
    sheet.arrow((12.5, top + 3), (18, top + 3))
    sheet.arrow((end + 0.5, top + 3.6), (60, top + 3.6))
    sheet.arrow((60, top + 1.4), (end + 0.5, top + 1.4), colour=BLUE)
    end = sheet.model(60.5, top, 3, FORWARD, width=8, first=4)
    sheet.arrow((end + 0.5, top + 3), (93, top + 3))
    sheet.text(96, top + 3, "loss", weight="bold")
    sheet.text(52.5, top + 5.6, "activations", size=7)
    sheet.text(52.5, top - 0.6, "gradients", size=7, color=BLUE)


def _model_parallel():
    sheet = Canvas(37)
    _cut(sheet, 25)
    work = {
        "device 0": [(0, 2, "forward", FORWARD), (8, 4, "backward", BACKWARD)],
        "device 1": [(2, 2, "forward", FORWARD), (4, 4, "backward", BACKWARD)],
    }
    sheet.timeline(14, 11, 6.2, work)
    sheet.text(94, 10.5, "hatched:\nidle", size=8.5)
    return sheet


def _pipeline():
    sheet = Canvas(37)
    _cut(sheet, 25)
    count, ahead = 4, 1  # microbatches; device 1 starts one forward later
    forward = [[(m + d * ahead, 1, f"F{m}", FORWARD) for m in range(count)] for d in (0, 1)]
    start = count + ahead  # the backward pass begins on the last device
    backward = [[(start + 2 * (m + 1 - d), 2, f"B{m}", BACKWARD) for m in range(count)] for d in (0, 1)]
    sheet.timeline(14, 11, 4.9, {f"device {d}": forward[d] + backward[d] for d in (0, 1)})
    sheet.text(94, 10.5, "4 micro-\nbatches of\n32 images", size=8.5)
    return sheet


PICTURES = {
    "where_am_i": (_where_am_i, "two nodes with two processes each; rank counts over all, local_rank within a node"),
    "single": (_single, "one process takes the batch through all layers, backward, and one step: the reference"),
    "data_parallel": (
        _data_parallel,
        "one process scatters the batch over copies of the model, one thread a device, and gathers the outputs",
    ),
    "ddp": (
        _ddp,
        "every process has the whole model and a share of the batch; gradients are averaged by an all-reduce",
    ),
    "buckets": (idea, "the all-reduce of one bucket of gradients goes on while earlier layers compute the next bucket"),
    "model_parallel": (_model_parallel, "the layers are cut over two devices; while one computes the other is idle"),
    "pipeline": (_pipeline, "the batch is cut into microbatches, so that both devices compute at the same time"),
}
