"""Read what torch.profiler recorded in every rank: what each computed and sent in a step, and what its memory held.

An event is a dict with `rank`, `lane` (compute or comm), `kind`, `name`, `start` and `end`, in seconds since the step
began. L loads a batch; F, B, I, W and O compute: forward, backward, its halves, the optimizer. Their `layer`, or
`stage` and `microbatch`, are known where a mark in the trace names them (`mpdemo.training.recorder.mark`). A, G, R
and E are the all-reduce, all-gather, reduce-scatter and any other collective, S is a send `to` a rank, whose receive
was `posted`. All of these have `bytes`, and `moves`: the time from which bytes move, since all its ranks have joined.
A receive ends when its rank looks for it, which may be after the bytes have arrived.

On gloo an event is a span of its threads; on GPUs it is a kernel, which belongs to the operation that launched it. All
processes of a machine write the system's time, so nothing is aligned. PyTorch isn't needed. Taught in
notebooks/09_scaling.ipynb.
"""

import math
import re
from bisect import bisect
from collections import Counter, defaultdict
from itertools import pairwise
from typing import NamedTuple

from mpdemo import foreign
from mpdemo.errors import UserError

STEP, MARK = "mpdemo step", "mpdemo: "  # marks of a step, else the profiler's are used; and of the fields of an event
KINDS = {"allreduce": "A", "allgather": "G", "reducescatter": "R", "send": "send", "recv": "recv"}
NAMES = {"A": "all-reduce", "G": "all-gather", "R": "reduce-scatter", "F": "forward", "B": "backward"}
NAMES |= {"I": "backward, inputs", "W": "backward, weights", "O": "optimizer's step", "L": "loading"}
COMPUTES = "L", "F", "B", "I", "W", "O"
MESSAGE = "send", "recv"  # between two ranks; joined, it is one event, S
BLOCKED = re.compile(r"FSDP::|_c10d_functional::wait_tensor")  # the thread waits for tensors, or copies them
SILENT = re.compile(r"c10d::|_c10d_functional|profiler::")  # operations that compute nothing
BYTES = {"double": 8, "long": 8, "bfloat16": 2, "half": 2, "char": 1, "byte": 1, "bool": 1, "float8": 1}  # else 4
PAUSE = 1e-4  # s; shorter pauses are Python's


class Span(NamedTuple):
    """One row of a trace; times in seconds."""

    name: str
    cat: str
    thread: int
    start: float
    end: float
    args: dict


class Trace(NamedTuple):
    """What one rank's file holds: spans in order, and every block that came or went."""

    rank: int
    world: int
    spans: list
    memory: list  # (time, device, address, bytes, all bytes after it)


def load(path) -> Trace:
    """Read the file of one rank, as `export_chrome_trace` writes it, packed or not."""
    with foreign.faults(f"{path} is no trace of torch.profiler"):
        trace = foreign.unpacked(path)
        world, base = trace.get("distributedInfo", {}), trace.get("baseTimeNanoseconds", 0) / 1e9
        spans, memory = [], []
        for row in trace["traceEvents"]:
            start, args = base + row.get("ts", 0) / 1e6, row.get("args", {})
            if not math.isfinite(start + row.get("dur", 0)):
                raise ValueError(f"{row.get('name')!r} has no finite time")
            if row.get("ph") == "X":
                end = start + row["dur"] / 1e6
                spans.append(Span(row["name"], row.get("cat", ""), row["tid"], start, end, args))
            elif row.get("name") == "[memory]":
                memory.append((start, args["Device Type"], args["Addr"], args["Bytes"], args["Total Allocated"]))
    if not any(span.cat == "cpu_op" for span in spans):
        raise UserError(f"{path} has no operations; record with ProfilerActivity.CPU, and CUDA on a GPU")
    spans.sort(key=lambda span: (span.start, -span.end))
    return Trace(world.get("rank", 0), world.get("world_size", 1), spans, sorted(memory))


def steps_of(trace) -> list[Span]:
    """Return the span of every step on the thread that trains; of a trace without steps, the whole."""
    for mark in (STEP, "ProfilerStep#"):
        if found := [s for s in trace.spans if s.name.startswith(mark) and s.cat == "user_annotation"]:
            return found
    operations = [span for span in trace.spans if span.cat == "cpu_op"]
    thread = Counter(span.thread for span in operations).most_common(1)[0][0]
    end = max(span.end for span in trace.spans if span.cat != "Trace")
    return [Span(STEP, "", thread, operations[0].start, end, {})]


def rank_steps(trace) -> list[dict]:
    """Return `start`, `end` and `events` of each step of one rank, in the system's time."""
    transfers, blocks, steps = list(transfers_of(trace)), blocks_of(trace.spans), []
    kernels = [span for span in trace.spans if span.cat == "kernel"]
    for step in steps_of(trace):
        own = [row for row in transfers if step.start <= row["asked"] < step.end]
        spans = [span for span in trace.spans if step.start <= span.start < step.end]
        events = list(kernels_of(kernels, spans, blocks) if kernels else computed(spans, step.thread, blocks, own))
        numbers = Counter()
        for row in own:
            key = row["kind"] in MESSAGE, row["members"]
            row |= {"group": (*key, numbers[key])}  # equal on all ranks that take part
            numbers[key] += 1
        for row in [*events, *own]:
            row["rank"] = trace.rank + row.pop("device", 0)
        edges = [time for row in events + own for time in (row["start"], row["end"])]
        start, end = (min(edges), max(edges)) if kernels and edges else (step.start, step.end)
        steps.append({"name": step.name, "start": start, "end": end, "events": events + own})
    return steps


def blocks_of(spans) -> dict:
    """Return in which block each operation of autograd was created: its sequence number -> the mark's fields.

    The piece of the backward pass that undoes an operation has the same number.
    """
    blocks, mark = {}, None
    for span in spans:
        if span.name.startswith(MARK) and "layer" in span.name:
            mark = span
        if mark and span.thread == mark.thread and span.start < mark.end and "Sequence number" in span.args:
            blocks.setdefault(span.args["Sequence number"], {"layer": fields_of(mark)["layer"]})
    return blocks


def labelled(spans, thread, blocks) -> list:
    """Return what a thread computed, as (start, end, fields): outermost operations, and marks as a whole."""
    last = max((s.start for s in spans if is_backward(s)), default=math.inf)
    pieces, until, block = [], 0.0, {}
    for span in spans:
        if span.thread != thread or span.start < until:
            continue
        if span.name.startswith(MARK):
            fields = fields_of(span)
            if fields["kind"] not in COMPUTES:  # a message, which has spans of its own
                continue
        elif span.name.startswith("Optimizer.step#"):
            fields = {"kind": "O"}
        elif span.name.startswith("enumerate(DataLoader)"):
            fields = {"kind": "L"}
        elif is_backward(span):
            block = blocks.get(span.args.get("Sequence number"), block)
            fields = {"kind": "B"} | block
        elif span.cat == "cpu_op" and not SILENT.match(span.name):
            fields = {"kind": "F" if span.start < last else "O"}  # after the backward pass: clipping, or a score
        else:
            continue
        block = block if fields["kind"] == "B" else {}
        pieces.append((span.start, span.end, fields))
        until = span.end
    return pieces


def is_backward(span) -> bool:
    """Whether a span is a piece of the backward pass."""
    return span.name.startswith(("autograd::engine::evaluate_function", f"{MARK}kind=B", f"{MARK}kind=W"))


def fields_of(mark) -> dict:
    """Return the fields of an event that a mark names: its kind, and numbers."""
    pairs = (pair.split("=") for pair in mark.name.removeprefix(MARK).split())
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def computed(spans, thread, blocks, transfers):
    """Yield what the cores computed; where other threads do the backward pass, each of these is a device."""
    workers = list(dict.fromkeys(s.thread for s in spans if is_backward(s) and s.thread != thread))
    blocked = [(s.start, s.end) for s in spans if s.thread == thread and BLOCKED.match(s.name)]
    waits = blocked + [(row["start"], row["end"]) for row in transfers]
    for device, worker in enumerate(workers or [thread]):
        pieces = labelled(spans, worker, blocks)
        if workers and device == 0:
            pieces += [piece for piece in labelled(spans, thread, blocks) if piece[2]["kind"] == "O"]
        free = [(a, b, fields) for start, end, fields in pieces for a, b in without(start, end, blocked)]
        yield from joined(sorted(free, key=lambda piece: piece[0]), waits, device)


def kernels_of(kernels, spans, blocks):
    """Yield what GPUs computed: each kernel has the fields of the operation during which it was launched."""
    launches = {s.args["correlation"]: s for s in spans if "correlation" in s.args and s.cat != "kernel"}
    threads = {thread: labelled(spans, thread, blocks) for thread in {s.thread for s in launches.values()}}
    devices, lanes = sorted({kernel.args["device"] for kernel in kernels}), defaultdict(list)
    for kernel in kernels:
        launch = launches.get(kernel.args.get("correlation"))  # None: another step's
        if launch and not kernel.name.startswith("nccl"):
            pieces = threads[launch.thread]
            place = bisect(pieces, launch.start, key=lambda piece: piece[0]) - 1
            if place >= 0 and launch.start < pieces[place][1]:
                lanes[devices.index(kernel.args["device"])].append((kernel.start, kernel.end, pieces[place][2]))
    for device, pieces in lanes.items():
        yield from joined(sorted(pieces, key=lambda piece: piece[0]), [], device)


def without(start, end, blocked):
    """Yield the parts of a stretch of time in which the thread wasn't blocked."""
    for begin, until in blocked:
        if until > start and begin < end:
            if begin > start:
                yield start, begin
            start = max(start, until)
    if end > start:
        yield start, end


def joined(pieces, waits, device):
    """Yield events of pieces in order: equal ones are one event, unless there was something to wait for in a pause."""
    events = []
    for start, end, fields in pieces:
        last = events[-1] if events else None
        if last and start - last["end"] > PAUSE and any(a < start and b > last["end"] for a, b in waits):
            last = None
        if last and all(last.get(name) == fields.get(name) for name in ("kind", "layer", "stage", "microbatch")):
            last["end"] = max(end, last["end"])
            continue
        if last and start - last["end"] < PAUSE:
            last["end"] = start
        where = next((f" of {name} {fields[name]}" for name in ("microbatch", "layer") if name in fields), "")
        name = NAMES[fields["kind"]] + where.replace("layer", "block")
        events.append({"lane": "compute", "name": name, "start": start, "end": end, "device": device} | fields)
    yield from (row for row in events if row["end"] - row["start"] > PAUSE / 10)


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
        raise UserError(f"a group of {size} ranks is written as {text}, which doesn't say who the others are")
    return tuple(range(first[0], first[0] + size * apart.pop(), first[1] - first[0]))


def by_gloo(spans):
    """Yield (time asked, span, about) of gloo's transfers: its threads take up what c10d was asked for."""
    for what in (r"(?!send|recv)", "send", "recv"):
        asked = [span for span in spans if re.match(rf"c10d::{what}", span.name)]
        carried = [span for span in spans if re.match(rf"gloo:{what}", span.name)]
        for ask, span in paired(asked, carried) if len(asked) == len(carried) else zip(carried, carried, strict=True):
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
    launches = {s.args["correlation"]: s.start for s in spans if "correlation" in s.args and s.cat != "kernel"}
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
