"""Read what a rank of torch.profiler sent and received, over gloo and over NCCL: who with whom, and how many bytes."""

import math
import re
from itertools import pairwise

from mpdemo.errors import UserError

KINDS = {"allreduce": "A", "allgather": "G", "reducescatter": "R", "send": "send", "recv": "recv"}
NAMES = {"A": "all-reduce", "G": "all-gather", "R": "reduce-scatter", "F": "forward", "B": "backward"}
NAMES |= {"I": "backward, inputs", "W": "backward, weights", "O": "optimizer's step", "L": "loading"}
MESSAGE = "send", "recv"  # between two ranks; joined, it is one event, S
# of a number; of other types 4
BYTES = {"double": 8, "long": 8, "bfloat16": 2, "half": 2, "char": 1, "byte": 1, "bool": 1, "float8": 1}


def transfers_of(trace):
    """Yield what a rank sends and receives, when it was asked for, and its `members`: the ranks that take part."""
    everyone = tuple(range(trace.world))
    for asked, span, about in [*by_gloo(trace.spans), *by_nccl(trace.spans)]:
        word = about["name"].partition("::")[2] or about["name"]
        kind = KINDS.get(re.sub(r"_|base|into.*|tensor.*|coalesced", "", word), "E")
        ranks = group_of(about["ranks"], about["size"], everyone) if about.get("ranks") else everyone
        row = {"lane": "comm", "kind": kind, "name": NAMES.get(kind, word.strip("_")), "asked": asked}
        row |= {"start": span.start, "end": span.end, "bytes": about["bytes"]}
        if kind in MESSAGE:
            peer = 1 - trace.rank if about["peer"] is None else about["peer"]
            ranks = (trace.rank, peer) if kind == "send" else (peer, trace.rank)
        if kind == "R" and "all_reduce" in span.name:
            row["name"] += " (gloo makes it of an all-reduce)"
        yield row | {"members": ranks}


def group_of(text, size, everyone) -> tuple:
    """Return the ranks of a group, of which PyTorch writes the first 30: ``[0, 8, 16, ...]``."""
    first = [int(number) for number in re.findall(r"\d+", text)]
    if "..." not in text:
        return tuple(first)
    if size == len(everyone):
        return everyone
    apart = {after - before for before, after in pairwise(first)}
    if len(apart) != 1 or not size:
        raise UserError(
            f"a group of {size} ranks is written as {text}, which doesn't say who the others are"
        )
    return tuple(range(first[0], first[0] + size * apart.pop(), first[1] - first[0]))


def by_gloo(spans):
    """Yield (time asked, span, about) of gloo's transfers: its threads take up what c10d was asked for."""
    for what in (r"(?!send|recv)", "send", "recv"):
        asked = [span for span in spans if re.match(rf"c10d::{what}", span.name)]
        carried = [span for span in spans if re.match(rf"gloo:{what}", span.name)]
        for ask, span in (
            paired(asked, carried) if len(asked) == len(carried) else zip(carried, carried, strict=True)
        ):
            numbers = [number for dims in (ask, span) for number in sizes(dims.args.get("Input Dims", []))]
            kind = next(iter(span.args.get("Input type", [])), "")
            inputs = ask.args.get("Concrete Inputs", [])
            about = {"name": ask.name.replace("gloo:", ""), "bytes": max(numbers, default=0) * width(kind)}
            about["peer"] = int(inputs[2]) if what in MESSAGE and len(inputs) > 2 else None
            if what in MESSAGE:
                span = span._replace(start=ask.start)  # gloo's span may begin after its bytes have left
            yield ask.start, span, about


def paired(asked, carried):
    """Yield what c10d was asked for with what carried it: of neighbours, a thread may begin the second one earlier."""
    left = list(carried)
    for ask in asked:
        dims = ask.args.get("Input Dims") if "allreduce" in ask.name else None
        alike = (span for span in left if dims and sizes(span.args.get("Input Dims", [])) == sizes(dims))
        span = next(alike, left[0])
        left.remove(span)
        yield ask, span


def by_nccl(spans):
    """Yield (time asked, span, about) of NCCL's kernels; of its arguments, the launching operation's row tells more."""
    told = {span.args.get("External id"): span.args for span in spans if span.name == "record_param_comms"}
    launches = {
        s.args["correlation"]: s.start for s in spans if "correlation" in s.args and s.cat != "kernel"
    }
    for span in (span for span in spans if span.cat == "kernel" and span.name.startswith("nccl")):
        args = told.get(span.args.get("External id"), {}) | span.args
        kind = args.get("Collective name") or span.name.partition("_")[2].partition("_")[0]
        numbers = args.get("In msg nelems", 0), args.get("Out msg nelems", 0)
        about = {"name": kind.lower(), "bytes": max(numbers) * width(args.get("dtype", ""))}
        about |= {
            "ranks": args.get("Process Group Ranks"),
            "size": args.get("Group size"),
            "peer": args.get("Dst Rank" if kind == "send" else "Src Rank"),
        }
        yield launches.get(span.args.get("correlation"), span.start), span, about


def sizes(dims) -> list[int]:
    """Return how many numbers each tensor has, in a nested list of shapes."""
    if dims and all(isinstance(size, int) for size in dims):
        return [math.prod(dims)]
    return [number for part in dims if isinstance(part, list) for number in sizes(part)]


def width(kind) -> int:
    """Return the bytes of a number of a type, as a trace names it."""
    return next((bytes_ for word, bytes_ in BYTES.items() if word in kind.lower()), 4)
