"""Read what torch.profiler recorded in every rank: what each computed and sent in a step, and what its memory held.

An event is a dict with `rank`, `lane` (compute or comm), `kind`, `name`, `start` and `end`, in seconds since the step
began. L loads a batch; F, B, I, W and O compute: forward, backward, its halves, the optimizer. Their `layer`, or
`stage` and `microbatch`, are known where a mark in the trace names them (`mpdemo.training.recorder.mark`). A, G, R
and E are the all-reduce, all-gather, reduce-scatter and any other collective, S is a send `to` a rank, whose receive
was `posted`. All of these have `bytes`, and `moves`: the time from which bytes move, since all its ranks have joined.
A receive ends when its rank looks for it, which may be after the bytes have arrived.

On gloo an event is a span of its threads; on GPUs it is a kernel, which belongs to the operation that launched it. All
processes of a machine write the system's time, so nothing is aligned. PyTorch isn't needed. Taught in
notebooks/63_who_waits.ipynb.
"""

import math
import re
from bisect import bisect
from collections import Counter, defaultdict
from typing import NamedTuple

from mpdemo import foreign
from mpdemo.errors import UserError
from mpdemo.measure.transfers import MESSAGE, NAMES, transfers_of

# marks of a step, else the profiler's are used; and of the fields of an event
STEP, MARK = "mpdemo step", "mpdemo: "
COMPUTES = "L", "F", "B", "I", "W", "O"
# the thread waits for tensors, or copies them
BLOCKED = re.compile(r"FSDP::|_c10d_functional::wait_tensor")
SILENT = re.compile(r"c10d::|_c10d_functional|profiler::")  # operations that compute nothing
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
                memory.append(
                    (start, args["Device Type"], args["Addr"], args["Bytes"], args["Total Allocated"])
                )
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
        events = list(
            kernels_of(kernels, spans, blocks) if kernels else computed(spans, step.thread, blocks, own)
        )
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
            # after the backward pass: clipping, or a score
            fields = {"kind": "F" if span.start < last else "O"}
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
                lanes[devices.index(kernel.args["device"])].append(
                    (kernel.start, kernel.end, pieces[place][2])
                )
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
        if last and all(
            last.get(name) == fields.get(name) for name in ("kind", "layer", "stage", "microbatch")
        ):
            last["end"] = max(end, last["end"])
            continue
        if last and start - last["end"] < PAUSE:
            last["end"] = start
        where = next(
            (f" of {name} {fields[name]}" for name in ("microbatch", "layer") if name in fields), ""
        )
        name = NAMES[fields["kind"]] + where.replace("layer", "block")
        events.append(
            {"lane": "compute", "name": name, "start": start, "end": end, "device": device} | fields
        )
    yield from (row for row in events if row["end"] - row["start"] > PAUSE / 10)
