"""Measure what fraction of the GPU's roof each class of kernel reaches: a row of JSON per case, as soon as it is known.

    python tests/gpu/efficiency.py ROWS
    python tests/gpu/efficiency.py --from-trace TRACE RECORD     print a record of what a trace of the GPT shows

The roof is the plan's: the longer one of computing and moving, by the data sheet. It counts all scores of an attention,
of which a causal kernel computes half, and all that an operation is given. On a CPU the fractions mean nothing.
"""

import gzip
import json
import re
import sys
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch
from record import append
from throughput import DEVICE, LARGE, ON_GPU, Language, training
from torch.nn import functional as f
from torchvision.models import get_model

from mpdemo.errors import error_line
from mpdemo.measure import paired
from mpdemo.models.private_torch import FakeTensors
from mpdemo.predict.counting import size, tensors_in
from mpdemo.tools.plan.efficiency import AT_BEST, MEMORY
from mpdemo.tools.plan.gpu_operations import OnGpu
from mpdemo.tools.plan.gpus import GPUS, named
from mpdemo.tools.plan.kernels import Kernels
from mpdemo.tools.plan.roof import kernel_seconds, roof
from mpdemo.world import clock

GPU = named(torch.cuda.get_device_name()) if ON_GPU else "h100"
SIDE, ROUNDS, BATCH, PIXELS = (1024, paired.ROUNDS, 128, 224) if ON_GPU else (16, 2, 2, 32)
ROUND = 0.01  # seconds at least of a round, in which a short operation is repeated
TYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
# rows, inputs, outputs / 1,024
THIN = (32, 2, 6), (32, 2, 8), (32, 8, 2), (16, 2, 49), (1 / 16, 8, 8), (1 / 128, 8, 8)
MOVING = {  # functions that move more than they compute
    "copy": torch.clone,
    "add": lambda x: x + x,
    "GELU": f.gelu,
    "layer norm": lambda x: f.layer_norm(x, x.shape[1:]),
    "RMS norm": lambda x: f.rms_norm(x, x.shape[1:]),
    "softmax": lambda x: x.softmax(-1),
    "cross entropy": lambda x: f.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
}
CLASSES = {  # of a trace -> what the names of its operations, there and on fake tensors, contain
    "product": "mm$", "attention": "attention", "AdamW, foreach": "_foreach", "copy": "copy|clone", "add": "::add_?$",
    "layer norm": "layer_norm", "GELU": "gelu", "softmax and loss": "softmax|nll|empty_like|fill", "other": "",
}  # fmt: skip
TRACED = 2, 3  # the batch and the steps in the trace of the GPT


class Counted(Kernels):
    """Note each operation's name as well, and what it writes in place on lists, of which `Kernels` sees no result.

    `products` has the rows, inner places and columns of each matrix product.
    """

    def __init__(self):
        super().__init__()
        self.names, self.products = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        count, name = len(self.work), func._schema.name
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.names += [name] * (len(self.work) - count)
        if re.search(CLASSES["product"], name):
            one, other = tensors_in(args)[-2:]
            self.products.append((*one.shape, other.shape[1]))
        if len(self.work) > count and result is None:
            read = {id(tensor): tensor.nbytes for tensor in tensors_in(args)}
            written = size([args[place] for place in ((0, 2, 3) if "fused" in name else (0,))])
            self.work[-1] = *self.work[-1][:3], sum(read.values()) + written, MEMORY
        return result


def at_roof(work, gpu, precision="fp32") -> float:
    """Return the seconds that operations take at the roof; in "tf32" all products of float32 are."""
    limits = roof(gpu, AT_BEST)._replace(launch=0.0)
    products = limits.convolutions if precision == "tf32" else limits.products
    return kernel_seconds(np.array(work, dtype=float), limits._replace(products=products))


def cases():
    """Yield class, sizes, precision, layout and a function to time, the most valuable first."""
    yield "launch", (), "fp32", "", torch.zeros((), device=DEVICE).neg_
    squares = product([(n, n, n) for n in (8, 4, 2, 16, 1, 0.5)], TYPES)
    for sizes, precision in [*squares, *product(THIN, ["bf16"])]:
        m, k, n = (max(1, int(size * SIDE)) for size in sizes)
        given = (torch.randn(rows, k, device=DEVICE, dtype=TYPES[precision]) for rows in (m, n))
        yield "product", (m, k, n), precision, "", partial(f.linear, *given)
    for length in (1, 2, 4, 8):
        causal = partial(f.scaled_dot_product_attention, is_causal=True)
        yield from passes("attention", causal, [(16 // length, 16, length * SIDE, 128)] * 3, "bf16")
    for precision, (name, function) in product(("fp32", "bf16"), MOVING.items()):
        sizes = (8 * SIDE, 49 * SIDE) if name == "cross entropy" else (16 * SIDE, 4 * SIDE)
        yield from passes(name, function, [sizes], precision)
    for way in ("foreach", "fused"):
        weights = [torch.ones(4 * SIDE, 4 * SIDE, device=DEVICE, requires_grad=True) for _ in range(16)]
        sum(weight.sum() for weight in weights).backward()
        step = torch.optim.AdamW(weights, **{way: True}).step
        step()  # which makes the states
        yield f"AdamW, {way}", (16, 4 * SIDE, 4 * SIDE), "fp32", "", step
    layouts = ("NHWC", torch.channels_last), ("NCHW", torch.contiguous_format)
    for (layout, form), precision, (conv, shape) in product(layouts, ("bf16", "tf32"), convolutions()):
        function = partial(f.conv2d, stride=conv.stride, padding=conv.padding)
        name = f"convolution, stride {conv.stride[0]}"
        yield from passes(name, function, [shape, conv.weight.shape], precision, layout, form)


def convolutions() -> list:
    """Return each convolution of a ResNet-50 once, and the shape that it is given."""
    found = {}
    with torch.device("meta"):
        network = get_model("resnet50")
        for part in filter(lambda part: isinstance(part, torch.nn.Conv2d), network.modules()):
            part.register_forward_pre_hook(
                lambda conv, x: found.update({(str(conv), x[0].shape): (conv, x[0].shape)})
            )
        network(torch.empty(BATCH, 3, PIXELS, PIXELS))
    return list(found.values())


def passes(name, function, shapes, precision, layout="", form=None):
    """Yield the forward and the backward pass of a function of tensors with these shapes."""
    given = [torch.randn(shape, device=DEVICE, dtype=TYPES[precision]) for shape in shapes]
    given = [(x.to(memory_format=form) if form else x).requires_grad_() for x in given]
    facts, result = ([list(shape) for shape in shapes], precision, layout), function(*given)
    yield f"{name}, forward", *facts, lambda: function(*given)
    if name != "copy":  # whose backward pass hands its gradient on
        ones = torch.ones_like(result)
        yield (
            f"{name}, backward",
            *facts,
            lambda: torch.autograd.grad(result, given, ones, retain_graph=True),
        )


def fractions(name, precision, function) -> list[float]:
    """Return the fraction of the roof in each round, after two calls to warm up."""
    with Counted() as counted:
        function()
    least = GPUS[GPU].launch if name == "launch" else at_roof(counted.work, GPU, precision)
    begin = clock.now(DEVICE)
    function()
    repeats = max(1, min(1000, int(ROUND / (clock.now(DEVICE) - begin))))
    times = [clock.read(DEVICE)]
    for _ in range(ROUNDS):
        for _ in range(repeats):
            function()
        times.append(clock.read(DEVICE))
    return [least * repeats / clock.seconds(begin, end) for begin, end in pairwise(times)]


def row(name, sizes, precision, layout, found) -> dict:
    """Return a row of the table: the median of the fractions, and how far they spread."""
    low, middle, high = np.quantile(found, (0, 0.5, 1)).round(4).tolist()
    facts = {"class": name, "sizes": sizes, "precision": precision, "layout": layout}
    return facts | {"fraction": middle, "spread": [low, high]}


def by_class(seconds) -> dict:
    """Add up the seconds of operations by class."""
    found = dict.fromkeys(CLASSES, 0.0)
    for name, spent in seconds:
        found[next(each for each, pattern in CLASSES.items() if re.search(pattern, name))] += spent
    return found | {"the last six together": sum(list(found.values())[3:])}


def products(seconds) -> np.ndarray:
    """Return the seconds of the matrix products among operations, in order."""
    return np.array([spent for name, spent in seconds if re.search(CLASSES["product"], name)])


def from_trace(trace, record) -> dict:
    """Return a record of what the kernels in a trace reach, by the class of the operation that launched each."""
    events = json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]
    facts = json.loads(Path(record).read_text())
    names = {
        event["args"]["External id"]: event["name"] for event in events if event.get("cat") == "cpu_op"
    }
    kernels = sorted(
        (event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"]
    )
    spent = [(names[kernel["args"]["External id"]], kernel["dur"] / 1e6) for kernel in kernels]
    length = len(spent) // TRACED[1]
    steps = [by_class(spent[begin : begin + length]) for begin in range(0, len(spent), length)]
    Language.size = LARGE
    with FakeTensors(), Counted() as counted, OnGpu():
        step = training(Language(), (), TRACED[0])
        step.optimizer.param_groups[0]["foreach"] = True  # as on a GPU
        step()
        counted.work, counted.names, counted.products = (
            [],
            [],
            [],
        )  # in the second step the optimizer's states are there
        step()
    gpu = named(facts["device"])
    bests = [(name, at_roof([each], gpu)) for name, each in zip(counted.names, counted.work, strict=True)]
    least = by_class(bests)
    sizes = {"model": "gpt", "batch": TRACED[0]} | LARGE
    rows = [
        row(name, sizes, "bf16 autocast", "", [least[name] / step[name] for step in steps])
        for name in least
    ]
    of_steps = [products(spent[begin : begin + length]) for begin in range(0, len(spent), length)]
    for operations in sorted(set(map(np.prod, counted.products))):
        places = np.array([np.prod(each) == operations for each in counted.products])
        best, size = products(bests)[places].sum(), counted.products[int(places.argmax())]
        rows.append(
            row("product", size, "bf16 autocast", "", [best / times[places].sum() for times in of_steps])
        )
    why = f"computed from {Path(trace).name}, without the GPU"
    part = {"part": "efficiency of the trace", "outcome": "passed", "why": why, "rows": rows}
    return {name: facts[name] for name in ("device", "driver", "torch", "date", "commit")} | {
        "parts": [part]
    }


def main():
    if sys.argv[1] == "--from-trace":
        sys.exit(print(json.dumps(from_trace(*sys.argv[2:]), indent=1)))
    for name, sizes, precision, layout, function in cases():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            found = row(name, sizes, precision, layout, fractions(name, precision, function))
        except Exception as error:  # whatever it is, the other cases are worth measuring
            found = {"class": name, "sizes": sizes, "precision": precision, "error": error_line(error)}
        append([found], sys.argv[1])
    sys.exit('"error": ' in Path(sys.argv[1]).read_text())


if __name__ == "__main__":
    main()
