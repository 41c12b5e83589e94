"""Read recorded timelines: idle shares, the time each stage takes, the simulation beside them.

A step is a list of rows ``{"rank", "stage", "kind", "microbatch", "start", "end"}``; times in seconds since the
earliest operation of any rank in that step. Those of `Recorder.operation` also have `on_core`, the seconds for which
the thread had a CPU core. `kind` is F, B, I or W (computing), O (the optimizer's step), A (an all-reduce), G (an
all-gather) or R (a reduce-scatter). PyTorch is not needed. Taught in notebooks/31_microbatches.ipynb.
"""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

from mpdemo.errors import UserError
from mpdemo.predict import simulate

COMPUTES = ("F", "B", "I", "W")
WORKS = (*COMPUTES, "A", "G", "R")  # and the messages in which all take part


def load(folder):
    """Return all steps recorded in a run's folder, each a list of rows sorted by rank and start."""
    paths = sorted(Path(folder).glob("timeline-rank*.json"))
    if not paths:
        raise UserError(f"no timeline-rank*.json in {folder}; record one with: --timeline")
    ranks = [json.loads(path.read_text())["steps"] for path in paths]
    return [merge(parts) for parts in zip(*ranks, strict=True)]


def merge(parts):
    """Join one step's recordings of all ranks, and set its zero."""
    rows = [row for part in parts for row in part["events"]]
    zero = min(row["start"] for row in rows if row["kind"] in COMPUTES)
    rows = [row | {"start": row["start"] - zero, "end": row["end"] - zero} for row in rows]
    return sorted(rows, key=lambda row: (row["rank"], row["start"]))


def step_time(rows):
    """Return the seconds from the first operation of any rank to the last one's end."""
    return max(row["end"] for row in rows if row["kind"] in WORKS)


def idle_share(rows):
    """Return the share of all ranks' time in which nothing is computed: the measured bubble."""
    computing = [row for row in rows if row["kind"] in COMPUTES]
    busy = sum(row["end"] - row["start"] for row in computing)
    return 1 - busy / len({row["rank"] for row in computing}) / step_time(rows)


def waiting(rows) -> list[dict]:
    """Return when each rank computed nothing, and why: `kind` "exposed" (its bytes moved) or "waits" (`on` a rank).

    `rows` are a step of `mpdemo.measure.traces`. A rank that is through with it waits for the last one. In what is left
    of its time a rank did neither: it copied, for example, or was in Python.
    """
    groups = defaultdict(list)
    for row in rows:
        if "moves" in row:
            groups[row["group"]].append(row)
    last = max(rows, key=lambda row: row["end"])
    found = []
    for rank in sorted({row["rank"] for row in rows}):
        busy = [
            (row["start"], row["end"]) for row in rows if row["rank"] == rank and row["lane"] == "compute"
        ]
        own = [row for row in rows if rank in (row["rank"], row.get("to"))]
        reasons = [(max(row["end"] for row in own), last["end"], "waits", last["rank"])]
        for row in own:
            reasons += _reasons(row, rank, groups) if "moves" in row else []
        found += [{"rank": rank, **gap} for gap in _gaps(busy, reasons)]
    return found


def _reasons(row, rank, groups) -> list:
    """Return when a collective or a message keeps a rank waiting: until its bytes move, and while they do."""
    on, begin = max(groups[row["group"]], key=lambda other: other["start"])["rank"], row["start"]
    if "to" in row:  # a message
        on, begin = (row["to"], begin) if row["rank"] == rank else (row["rank"], row["posted"])
    return [(row["moves"], row["end"], "exposed", None), (begin, row["moves"], "waits", on)]


def _gaps(busy, reasons) -> list:
    """Return the parts of a rank's time for which there is a reason, and in which it isn't busy."""
    found = []
    edges = sorted({time for part in reasons + busy for time in part[:2]})
    for begin, end in pairwise(edges):
        middle = (begin + end) / 2
        now = [part[2:] for part in reasons if part[0] < middle < part[1]]
        if now and not any(a < middle < b for a, b in busy):
            kind, on = min(now, key=lambda why: why[0])
            found.append({"kind": kind, "on": on, "start": begin, "end": end})
    return found


def stage_times(steps):
    """Return the median seconds of a microbatch on every stage, of steps from `load` without the first.

    They are lists over the stages, the arguments of `mpdemo.predict.simulate`: ``forward``, ``backward`` (I and W
    together where they are split) and ``weight`` (W's share of the backward).
    """
    seconds = defaultdict(list)
    for row in (row for step in steps for row in step if row["kind"] in COMPUTES):
        seconds[row["kind"], row["stage"]].append(row["end"] - row["start"])
    times = {key: median(values) for key, values in seconds.items()}
    stages = range(1 + max(stage for _, stage in times))
    weight = [times.get(("W", s), 0.0) for s in stages]
    backward = [times.get(("B", s), 0.0) or times.get(("I", s), 0.0) + weight[s] for s in stages]
    share = [part / whole if whole else 0.0 for part, whole in zip(weight, backward, strict=True)]
    return {"forward": [times["F", s] for s in stages], "backward": backward, "weight": share}


def predict(steps, schedule):
    """Simulate the recorded pipeline with the stage times that were measured in it, without communication."""
    computing = [row for step in steps for row in step if row["kind"] in COMPUTES]
    replicas = {row["rank"] for row in computing if row["stage"] == 0}  # several in a hybrid training
    microbatches = 1 + max(row["microbatch"] for row in computing)
    ranks = len({row["rank"] for row in computing}) // len(replicas)
    return simulate(schedule, **stage_times(steps), microbatches=microbatches, ranks=ranks)


def predict_seconds(step, schedule, cores=None):
    """Return the seconds of a step as `predict` simulates it, each rank's recorded optimizer step added to its end.

    Where the ranks share fewer `cores`, an operation takes the time for which it had one; and the step is no shorter
    than all these times one after the other on each core.
    """
    if cores:
        works = [
            row | {"end": row["start"] + row["on_core"]} for row in step if row["kind"] in (*COMPUTES, "O")
        ]
        return max(predict_seconds(works, schedule), sum(row["on_core"] for row in works) / cores)
    updates = {row["rank"]: row["end"] - row["start"] for row in step if row["kind"] == "O"}
    return max(row["end"] + updates.get(row["rank"], 0.0) for row in predict([step], schedule).events)
