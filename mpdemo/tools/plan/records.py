"""What a GPU's kernels reach, from a record of it, or from a trace of a training step by torch.profiler.

    efficiency_of("notebooks/gpu/2026-11-27-4-h100-efficiency-of-its-trace.json", "h100")

A record has fractions of the data sheet (tests/gpu/efficiency.py measures them). A trace with the operations' shapes
has what each kernel took, and the shapes tell what it takes at best.
"""

import re
from ast import literal_eval
from collections import defaultdict
from math import prod
from pathlib import Path

import numpy as np

from mpdemo import foreign
from mpdemo.errors import UserError
from mpdemo.tools.plan.efficiency import (
    AT_BEST,
    ATTENTION,
    CONVOLUTION,
    CONVOLUTION_32,
    KINDS,
    MEMORY,
    OPTIMIZER,
    PRODUCT,
    known_of,
)
from mpdemo.tools.plan.gpus import named
from mpdemo.tools.plan.roof import kernel_seconds, roof

# first words of a record; others move
CLASSES = {"product": PRODUCT, "attention": ATTENTION, "AdamW": OPTIMIZER}
TOGETHER = "the last six together"  # a record's row: all that moves, by the time that it took
BYTES = {
    "float": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "double": 8,
    "long int": 8,
    "bool": 1,
    "unsigned char": 1,
}
ALLOWED = "allowed: a record of make gpu-record, or a trace of torch.profiler, also .gz"


def efficiency_of(file, gpu):
    """Return the `Efficiency` that a file shows; what it does not have stays as it is known of the GPU."""
    with foreign.faults(f"--record {file} cannot be read", ALLOWED):
        content = foreign.unpacked(file)
    if not isinstance(content, dict) or not {"traceEvents", "parts"} & {*content}:
        raise UserError(f"--record {file} is neither a record nor a trace; {ALLOWED}")
    with foreign.faults(f"--record {file} has other things in it than it should", ALLOWED):
        return _shown(file, content, gpu)


def _shown(file, content, gpu):
    known = known_of(gpu)
    device, when = content.get("device"), f"PyTorch {content.get('torch')}, {str(content.get('date'))[:10]}"
    if "traceEvents" in content:
        device, when = (content.get("deviceProperties") or [{}])[0].get("name"), "trace"
    if device and not gpu.startswith(named(device) or device):
        raise UserError(
            f"--record {file} was measured on {device}, and --gpu is {gpu}; allowed: a record of that GPU"
        )
    together = {}
    if when == "trace":
        kernels = [event for event in content["traceEvents"] if event.get("cat") == "kernel"]
        rows = _of_trace(file, content["traceEvents"], kernels, roof(gpu, AT_BEST)._replace(launch=0.0))
    else:
        rows = list(_of_record(content["parts"], together))
    if not rows:
        raise UserError(f"--record {file} has no efficiency of any kernel; {ALLOWED}")
    found = known.measured(rows, together, f"{Path(file).name} ({device}, {when})")
    # The plan counts more of some kernels than they do: of causal attention all scores, say, of a trace's other views.
    largest = float("inf") if when == "trace" else 2
    of_classes = (
        (kind, fraction, 1 + (kind == ATTENTION)) for kind, fraction in enumerate(found.fractions)
    )
    for kind, fraction, most in [*((row[0], row[2], largest) for row in rows), *of_classes]:
        if not 0 < fraction <= most:
            raise UserError(
                f"--record {file}: {KINDS[kind]} reach {fraction:.3g} of the data sheet; allowed: above 0, up to {most}"
            )
    return found


def _of_record(parts, together):
    """Yield the rows of a record; note in `together` what it has of a whole class. Of convolutions, channels last."""
    for row in [
        row for part in parts if part["part"].startswith("efficiency") for row in part.get("rows", ())
    ]:
        name, fraction, sizes = row["class"], row.get("fraction"), row["sizes"]
        kind = CLASSES.get(name.split(",")[0], MEMORY)
        if name.startswith("convolution"):
            kind = CONVOLUTION if row["precision"] == "bf16" else CONVOLUTION_32
        elsewhere = kind == PRODUCT and not row["precision"].startswith("bf16")
        if fraction is None or name in ("launch", "AdamW, fused") or row["layout"] == "NCHW" or elsewhere:
            continue
        if name == TOGETHER or (kind == PRODUCT and isinstance(sizes, dict)):
            together[kind] = fraction
        else:
            yield kind, 2 * prod(sizes) if kind == PRODUCT else 0, fraction, 1


def _of_trace(file, events, kernels, limits) -> list:
    """Return the rows of a trace, each an operation and its kernels."""
    operations = {
        event.get("args", {}).get("External id"): event for event in events if event.get("cat") == "cpu_op"
    }
    spent, rows = defaultdict(float), []
    for kernel in kernels:
        spent[kernel.get("args", {}).get("External id")] += kernel["dur"] / 1e6
    if not kernels:
        raise UserError(
            f"--record {file} has no kernels of a GPU; allowed: a trace with ProfilerActivity.CUDA"
        )
    known = [
        (operations[number], seconds)
        for number, seconds in spent.items()
        if number in operations and seconds
    ]
    if not any("Input Dims" in operation.get("args", {}) for operation, _ in known):
        raise UserError(
            f"--record {file} has no shapes; allowed: a trace of torch.profiler.profile(record_shapes=True)"
        )
    for operation, seconds in known:
        work = _work(operation["name"].removeprefix("aten::"), operation["args"])
        if work and (least := kernel_seconds(np.array([work], dtype=float), limits)):
            rows.append((work[4], sum(work[:3]), least / seconds, least))
    return rows


def _work(name, args) -> list | None:
    """Return an operation of a trace as a row of `mpdemo.tools.plan.kernels.Kernels`; None where its shapes don't tell.

    What moves is taken to write as much as its first input, but for a copy, whose first input is the output.
    """
    given = zip(args.get("Input Dims", ()), args.get("Input type", ()), strict=False)
    tensors = [(shape, BYTES[kind]) for shape, kind in given if kind in BYTES and shape]
    if not tensors or name.startswith(("_foreach", "_fused")):
        return None
    shapes, operations, kind, half = (
        [shape for shape, _ in tensors],
        0,
        MEMORY,
        "c10::" in args["Input type"][0],
    )
    written = 0 if name in ("copy_", "sum", "mean") else prod(shapes[0])
    if re.search("mm(_|$)", name):
        kind, written = PRODUCT, prod(shapes[-2][:-1]) * shapes[-1][-1]
        operations = 2 * written * shapes[-2][-1]
    elif "attention" in name:  # heads may stand before or after the positions, of which there are more
        backward = "backward" in name
        kind, operations = (
            ATTENTION,
            (10 if backward else 4) * prod(shapes[0]) * max(shapes[1 + backward][1:3]),
        )
    elif "convolution" in name:
        kind = CONVOLUTION if half else CONVOLUTION_32
        written, operations = _of_convolution(name, shapes, args)
    row = [0, 0, 0, sum(prod(shape) * bytes_ for shape, bytes_ in tensors) + written * tensors[0][1], kind]
    row[2 if half else 0 if kind == CONVOLUTION_32 else 1] = operations
    return row


def _of_convolution(name, shapes, args) -> tuple:
    """Return how many numbers a convolution writes, or one or both of its gradients, and the operations."""
    lists = [literal_eval(text) for text in args["Concrete Inputs"] if text.startswith("[")]
    if "backward" in name:
        gradient, x, weight, *_ = shapes
        return prod(x) + prod(weight), 2 * sum(lists[-1][:2]) * prod(gradient) * prod(weight[1:])
    (x, weight, *_), (one, other, dilation, *_) = shapes, lists
    # cuDNN pads first
    stride, padding = (one, other) if name in ("convolution", "_convolution") else (other, one)
    places = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    out = x[0] * weight[0] * prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in places)
    return out, 2 * out * prod(weight[1:])
