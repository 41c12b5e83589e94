"""Put the traces of all ranks on one axis: the steps that the player and the timelines show.

A step is what spans.py finds in each rank's trace, joined: only together do the ranks tell when the last one joined a
collective, and so for which of them the others waited. PyTorch isn't needed. Taught in notebooks/63_who_waits.ipynb.
"""

import math
from bisect import bisect
from collections import defaultdict
from glob import glob
from itertools import accumulate
from pathlib import Path

from mpdemo.errors import UserError, text_of
from mpdemo.measure.spans import load, rank_steps
from mpdemo.measure.transfers import MESSAGE

APART = 5e-3  # s by which a rank seems to leave a collective before the last one joins, where clocks differ
PARTS = "weights", "optimizer", "gradients", "activations"  # of the memory
OF_A_TRACE = "gathered weights", "there before", "gradients", "activations"
# spans that allocate weights, gradients
FSDP = ("FSDP::all_gather", "FSDP::pre_"), "FSDP::post_backward_reduce"
MOST = 160  # rows of memory in a step


def read(paths) -> dict:
    """Return a step of a reader's own traces as the player shows it: the one of median length, of all ranks.

    `paths` is a pattern such as ``trace-rank*.json.gz``, or a list of files, one per rank.
    """
    several = isinstance(paths, list | tuple)
    found = [
        text_of(path, "a trace's path, or a pattern of paths,") for path in (paths if several else [paths])
    ]
    found = found if several else sorted(glob(found[0]))
    if not found:
        raise UserError(
            f"no trace {paths}; write one per rank: profiler.export_chrome_trace('trace-rank0.json.gz')"
        )
    traces = sorted((load(path) for path in found), key=lambda trace: trace.rank)
    if [trace.rank for trace in traces] != list(range(world := max(trace.world for trace in traces))):
        ranks = ", ".join(str(trace.rank) for trace in traces)
        raise UserError(f"these are traces of ranks {ranks} of {world}; give one of each")
    ranks = [
        inner(steps) if trace.memory else steps
        for trace, steps in zip(traces, map(with_memory, traces), strict=True)
    ]
    if max(steps[0]["start"] for steps in ranks) > min(steps[-1]["end"] for steps in ranks):
        raise UserError(
            "the ranks' traces have no time in common: they are of several runs, or the nodes' clocks differ"
        )
    step = typical([merge(parts) for parts in zip(*ranks, strict=False)])
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    note = f"From {Path(found[0]).name}{others}: of {len(ranks[0])} steps the one of median length."
    about = {
        "source": "recorded",
        "strategy": "trace",
        "tab": "Yours",
        "title": "Your own trace",
        "note": note,
    }
    return about | {"parts": OF_A_TRACE, "hang": None} | step


def merge(parts) -> dict:
    """Join one step of all ranks: `ranks`, `events` from 0 to `end` in seconds, and `memory` of each rank, or None."""
    if len(names := dict.fromkeys(part["name"] for part in parts)) > 1:
        raise UserError(
            f"the ranks' traces begin with other steps: {', '.join(names)}; give traces of the same steps"
        )
    zero = min(part["start"] for part in parts)
    groups, events = defaultdict(list), []
    for part in parts:
        for row in part["events"]:
            (groups[row["group"]] if "group" in row else events).append(row)
    for number, ((_, members, _), rows) in enumerate(
        sorted(groups.items(), key=lambda pair: pair[1][0]["start"])
    ):
        if len(rows) != len(members) or len({row["kind"] in MESSAGE or row["kind"] for row in rows}) > 1:
            said = f"the {rows[0]['name']} number {number + 1} of ranks {', '.join(map(str, members))}"
            raise UserError(
                f"{said} has no like in all of their traces; give traces of the same steps of one run"
            )
        events += transfer(rows, f"g{number}")
    for row in events:
        row.update(
            {key: round(row[key] - zero, 6) for key in ("start", "posted", "moves", "end") if key in row}
        )
    memory = [
        [[round(max(time - zero, 0), 6), *values] for time, *values in part.get("memory", ())]
        for part in parts
    ]
    events.sort(key=lambda row: (row["rank"], row["start"]))
    ranks = 1 + max((row["rank"] for row in events), default=0)
    end = round(max(part["end"] for part in parts) - zero, 6)
    return {"ranks": ranks, "end": end, "events": events, "memory": memory if all(memory) else None}


def transfer(rows, group) -> list[dict]:
    """Return the events of one collective, or of a send and its receive: bytes move once the last rank has joined."""
    moves = max(row["start"] for row in rows)
    if rows[0]["kind"] in "AGR" and moves - min(row["end"] for row in rows) > APART:
        raise UserError("a rank leaves a collective before the last one joins: the traces' clocks differ")
    if rows[0]["kind"] in MESSAGE:
        receive, send = sorted(rows, key=lambda row: row["kind"])
        end, bytes_ = max(receive["end"], send["start"]), max(send["bytes"], receive["bytes"])
        name = f"message to rank {receive['rank']}"
        of_both = {"to": receive["rank"], "posted": receive["start"], "end": end, "bytes": bytes_}
        rows = [send | of_both | {"kind": "S", "name": name}]
    rows = [row | {"moves": min(moves, row["end"]), "group": group} for row in rows]
    return [{key: value for key, value in row.items() if key not in ("asked", "members")} for row in rows]


def inner(steps) -> list:
    """Return the steps but the first and the last, whose memory is half known: what outlives them is not seen."""
    return steps[1:-1] if len(steps) > 2 else steps


def typical(steps) -> dict:
    """Return the step of median length: neither the first one's start-up nor a disturbed one."""
    return sorted(steps, key=lambda step: step["end"])[(len(steps) - 1) // 2]


def with_memory(trace, base=None) -> list[dict]:
    """Return the steps of one rank with `memory`: rows (time, bytes of each of `PARTS`).

    `base` are the bytes of each part that stay allocated all the time. A trace alone tells what was allocated since it
    began and, on a GPU, how much there was before.
    """
    steps = rank_steps(trace)
    device = max((row[1] for row in trace.memory), default=0)
    events = [row for row in trace.memory if row[1] == device]
    if not events:
        return steps
    base = base or (0, events[0][4] - events[0][3] if device else 0, 0, 0)
    changes = []
    for start, end, bytes_, part in blocks_of_memory(trace, steps, events):
        changes += [(start, part, bytes_), (end, part, -bytes_)][: 1 if end == math.inf else 2]
    changes.sort()
    levels = accumulate(changes, lambda now, change: step_of(now, *change[1:]), initial=tuple(base))
    rows = [(time, *level) for (time, *_), level in zip(changes, [*levels][1:], strict=True)]
    for step in steps:
        step["memory"] = thinned(rows, step["start"], step["end"])
    return steps


def step_of(now, part, bytes_) -> tuple:
    """Return the bytes of all parts after one of them has grown."""
    return (*now[:part], now[part] + bytes_, *now[part + 1 :])


def blocks_of_memory(trace, steps, events) -> list:
    """Return (start, end, bytes, number of the part) of each block.

    FSDP allocates weights that it gathers and gradients that it reduces. Of a backward pass, the gradients are what
    is freed after it. gloo's threads free blocks without a word, at the latest when the optimizer begins.
    """
    gathers, reduces = (
        [(s.start, s.end) for s in trace.spans if s.name.startswith(names)] for names in FSDP
    )
    passes, blocks, live = list(backward_passes(steps)), [], {}
    for time, _, address, bytes_, _ in events:
        for other in [
            a for a, row in live.items() if a < address + max(bytes_, 1) and address < a + row[2]
        ]:
            row = live.pop(other)
            row[1], row[4] = time, bytes_ < 0
        if bytes_ > 0:
            live[address] = [time, math.inf, bytes_, 3, False]
            blocks.append(live[address])
    for row in blocks:
        backward, told = inside(row[0], passes), row.pop()
        if backward and not told and backward != passes[-1]:
            row[1] = min(row[1], backward[1])
        if inside(row[0], gathers):
            row[3] = 0
        elif backward and (row[1] > backward[1] or inside(row[0], reduces)):
            row[3] = 2
    return blocks


def backward_passes(steps):
    """Yield when each step's backward pass begins, and when it has ended: then the optimizer begins."""
    for step in steps:
        begin = min((row["start"] for row in step["events"] if row["kind"] in "BIW"), default=None)
        if begin is not None:
            updates = [
                row["start"] for row in step["events"] if row["kind"] == "O" and row["start"] > begin
            ]
            yield begin, min(updates, default=step["end"])


def inside(time, spans):
    """Return the one of some spans, in order, in which a time lies, or None."""
    place = bisect(spans, (time, math.inf)) - 1
    return spans[place] if place >= 0 and time <= spans[place][1] else None


def thinned(rows, start, end) -> list:
    """Return the fullest row of each of `MOST` parts of a step, in order; the first is what was there before."""
    before = [row for row in rows if row[0] < start][-1:]
    fullest = {0: (start, *before[0][1:])} if before else {}
    for row in rows:
        place = int((row[0] - start) / (end - start) * MOST)
        if 0 <= place < MOST and sum(row[1:]) >= sum(fullest.get(place, (0,))[1:]):
            fullest[place] = row
    return [list(row) for row in fullest.values()]
