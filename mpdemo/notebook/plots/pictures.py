"""The opening picture of each notebook: where the data, the layers and the gradients are on that rung."""

from mpdemo.errors import UserError, did_you_mean
from mpdemo.notebook.plots.canvas import Canvas
from mpdemo.notebook.plots.style import BLUE, GREEN, OPERATIONS, ORANGE, PURPLE, SKY, VERMILLION, bundle, paler
from mpdemo.plan import simulate

BATCH = (12, 8, "batch\n128 images", ORANGE)
HALF_BATCH = (9, 5, "64 images", ORANGE)


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
        The picture, and a sentence with the same content.

    Raises
    ------
    UserError
        There is no picture of this name.
    """
    if name not in PICTURES:
        raise UserError(f"no picture {name!r}; there are: {', '.join(PICTURES)}{did_you_mean(name, PICTURES)}")
    paint = PICTURES[name]
    return bundle(paint().figure, f"picture: {paint.__doc__}")  # the docstring is the sentence


def where_am_i():
    """two nodes with two processes each; rank counts over all, local_rank within a node"""
    sheet = Canvas(38)
    for node in (0, 1):
        left = 2 + 49 * node
        sheet.frame(left, 7, 47, 30, f"node {node}  (one computer)")
        for local in (0, 1):
            x = left + 2 + 22 * local
            sheet.frame(x, 9, 21, 23, "process")
            sheet.box(x + 1.5, 24.3, 18, 4.6, f"RANK = {2 * node + local}", ORANGE)
            sheet.box(x + 1.5, 18.8, 18, 4.6, f"LOCAL_RANK = {local}", SKY)
            sheet.box(x + 1.5, 13.3, 18, 4.6, f"device {local} of this node", GREEN)
    sheet.text(50, 3.5, "WORLD_SIZE = 4 = 2 nodes x 2 processes per node;   every process runs the same file")
    return sheet


def single():
    """one process takes the batch through all layers, backward, and one step: the reference"""
    sheet = Canvas(24)
    sheet.frame(20, 3, 60, 19, "one process, one device")
    end = sheet.row(1, 12, BATCH, 10, range(1, 7), 8, "loss")
    sheet.arrow((end + 2.5, 10), (24, 8.7), colour=BLUE, bend=-0.12)
    sheet.text(50, 4.8, "backward: a gradient for every weight, then the optimizer's step", size=8.5, color=BLUE)
    sheet.text(42, 17, "forward", size=8.5)
    sheet.text(90, 12, "the reference:\nevery other rung\nmust train the same", size=8.5)
    return sheet


def data_parallel():
    """one process scatters the batch over copies of the model, one thread per device, and gathers the outputs"""
    sheet = Canvas(34)
    sheet.frame(16, 1, 82.5, 32, "one process, one thread per device")
    sheet.row(1, 16, BATCH)
    for device, y in ((0, 21.5), (1, 7.5)):
        sheet.frame(38, y - 4.5, 36, 12, f"device {device}: a copy of the model")
        sheet.arrow((13.5, 16), (23.5, y))
        end = sheet.row(24, y, HALF_BATCH, 7, range(1, 6))
        sheet.arrow((end + 0.5, y), (82.5, 17.5 - 1.5 * device))
    sheet.text(24, 26.5, "scatter", size=8.5)
    sheet.box(83, 16, 12, 8, "loss\non device 0", PURPLE)
    sheet.text(89, 22, "gather", size=8.5)
    sheet.text(89, 6, "the model is copied\nin every step;\ngradients summed\non device 0", size=8)
    return sheet


def ddp():
    """every process has the whole model and a share of the batch; gradients are averaged by an all-reduce"""
    sheet = Canvas(34)
    sheet.row(1, 17, BATCH)
    for rank, y in ((0, 24), (1, 6.5)):
        sheet.frame(26, y - 5.5, 59, 14.5, f"process, rank {rank}, device {rank}: the whole model")
        sheet.arrow((7, 12.5 if rank else 21.5), (14, y), bend=0.25 if rank else -0.25)
        sheet.row(14.5, y, HALF_BATCH, 4.5, range(1, 6), 6, (14, 6, "gradients", GREEN))
    sheet.arrow((73, 9.8), (73, 20.8), both=True, colour=VERMILLION)
    sheet.text(71.5, 17, "all-reduce: the mean of all", size=8.5, ha="right", color=VERMILLION)
    sheet.text(92.5, 17, "same mean,\nsame step,\nsame weights\nin every\nprocess", size=8.5)
    return sheet


def buckets():
    """the all-reduce of one bucket of gradients goes on while earlier layers compute the next bucket"""
    sheet = Canvas(47)
    red, green = paler(VERMILLION, 0.7), OPERATIONS["B"][1]
    backward = [(6 + 2 * i, 2, f"B{6 - i}", green) for i in range(6)]  # start and length in ticks
    compute = [(0, 6, *OPERATIONS["F"]), *backward]
    at_the_end = [(18, 6, "all-reduce of all", red)]
    overlapped = [(start + length, 2, str(n), red) for n, (start, length, *_) in enumerate(backward[1::2], 1)]
    for y, title, network in ((34, "one after the other", at_the_end), (11, "in buckets, overlapped", overlapped)):
        ticks = network[-1][0] + network[-1][1]
        sheet.text(14, y + 8, f"{title}: {ticks} ticks", ha="left", weight="bold")
        sheet.timeline(14, y, 2.9, {"compute": compute, "network": network})
    sheet.text(92, 35, "B6: backward\nof layer 6, the\nfirst that is\nready", size=8.5)
    sheet.text(86, 11, "bucket 1: layers 6, 5\nbucket 2: layers 4, 3\nbucket 3: layers 2, 1", size=8.5)
    return sheet


def _cut(schedule, microbatches, remark):
    """Draw a model of six layers, cut over two devices, and its simulated timeline."""
    sheet = Canvas(37)
    for device, x in ((0, 20), (1, 60)):
        sheet.frame(x, 22.5, 24, 13, f"device {device}")
    end = sheet.row(1, 28, BATCH, 9.5, range(1, 4))
    sheet.row(62.5, 28, range(4, 7), 7, "loss")
    sheet.arrow((end + 0.5, 28.6), (62, 28.6))
    sheet.arrow((62, 26.4), (end + 0.5, 26.4), colour=BLUE)
    sheet.text(52, 30.6, "activations", size=7)
    sheet.text(52, 24.4, "gradients", size=7, color=BLUE)
    simulation = simulate(schedule, forward=[1, 1], backward=[2, 2], microbatches=microbatches, ranks=2)
    work = {"device 0": [], "device 1": []}
    for row in simulation.events:
        name, colour = OPERATIONS[row["kind"]]
        text = f"{row['kind']}{row['microbatch']}" if microbatches > 1 else name
        work[f"device {row['rank']}"].append((row["start"], row["end"] - row["start"], text, colour))
    sheet.timeline(14, 11, 74 / simulation.step_time, work)
    sheet.text(94, 10.5, remark, size=8.5)
    return sheet


def model_parallel():
    """the layers are cut over two devices; while one computes the other is idle"""
    return _cut("naive", 1, "hatched:\nidle")


def pipeline():
    """the batch is cut into microbatches, so that both devices compute at the same time"""
    return _cut("gpipe", 4, "4 micro-\nbatches of\n32 images")


PAINTERS = (where_am_i, single, data_parallel, ddp, buckets, model_parallel, pipeline)
PICTURES = {paint.__name__: paint for paint in PAINTERS}
