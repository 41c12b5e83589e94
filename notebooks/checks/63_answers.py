"""Checks of notebook 63: a straggler in the traces of all ranks, and one in a recording."""

import json
import tempfile
from collections import defaultdict
from pathlib import Path

from mpdemo.measure.timeline import waiting
from mpdemo.notebook.player import recording

EARLY = (0.0, 1.5, 0.4, 1.0, 2.0, 0.2, 1.2, 0.8)  # ms by which ranks join late in healthy steps
COUNT = 24  # all-reduces of a run


def arrivals(ranks, late):
    """Return when each rank joins each all-reduce, in ms: a jitter, and what `late` adds in this step (rank -> ms)."""
    for step in range(COUNT):
        # rank 1 is often last
        jitter = [EARLY[(3 * rank + step) % len(EARLY)] + (rank == 1) for rank in range(ranks)]
        yield [own + late(step).get(rank, 0) for rank, own in enumerate(jitter)]


def healthy(step):
    return {}


# ranks; who is late by how much; ms of a transfer; the straggler; what is special; what a wrong answer missed
RUNS = [
    (2, lambda step: {1: 60}, 5, 1, "For two ranks",
     "Rank 1 is 60 ms late each time, and in the healthy run no rank is later than 2 ms."),
    (4, lambda step: {2: 80 + step}, 5, 2, "For four ranks",
     "Rank 2 is late in each all-reduce. The clocks of two files differ by seconds."),
    (3, lambda step: {0: 40 * (step % 4 > 0)}, 5, 0, "For a rank that is late three times in four",
     "That is more than half of the all-reduces."),
    (2, healthy, 5, None, "For a run as healthy as the other one",
     "Some rank is always last, by a millisecond or two. A healthy run has no straggler."),
    (4, lambda step: {3: 5000 * (step == 7)}, 5, None, "For a rank that was late once, by 5 s",
     "One all-reduce isn't more than half of them."),
    (4, healthy, 60, None, "For a run on a slow network", "But all wait for the network, not for a rank."),
    (4, lambda step: {step % 4: 70}, 5, None, "For a run in which each time another rank is late",
     "It is late in one of four: the batches differ, not the ranks."),
]  # fmt: skip


def traces(rows, transfer):
    """Return a trace of each rank, as the profiler writes it, each by a clock of its own."""
    files = []
    for rank, own in enumerate(zip(*rows, strict=True)):
        events, now = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}], 1e8 + 5e6 * rank
        for arrival, row in zip(own, rows, strict=True):
            for name, start, end in (
                ("aten::mm", 0, arrival),
                ("gloo:all_reduce", arrival, max(row) + transfer),
            ):
                times = {"ts": now + 1000 * start, "dur": 1000 * (end - start)}
                events.append({"ph": "X", "name": name, "tid": 1} | times)
            now += 1000 * (max(row) + transfer + 20)
        files.append({"schemaVersion": 1, "traceEvents": events})
    return files


def check_63_1(straggler):
    for ranks, late, transfer, right, which, missed in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for name, how, milliseconds in (("healthy", healthy, 5), ("trace", late, transfer)):
                runs.append([Path(folder, f"{name}_{rank}.json") for rank in range(ranks)])
                for path, content in zip(
                    runs[-1], traces([*arrivals(ranks, how)], milliseconds), strict=True
                ):
                    path.write_text(json.dumps(content))
            got = straggler(runs[1], runs[0])
        said = f"{which} it names {'no rank' if got is None else f'rank {got}'}."
        assert (got, right) != (0, 1), f"{said} Its all-reduces are the longest: it is the one that waits."
        assert got == right, f"{said} {missed}"


WORDS = {"forward": "F", "backward": "B", "optimizer": "O"}


def check_63_2(answer):
    waiter, slow, word = answer
    events, waits, works = recording("puzzle")["events"], defaultdict(float), defaultdict(float)
    for row in events:
        works[row["rank"], row["kind"]] += row["end"] - row["start"]
    for row in waiting(events):
        waits[row["rank"], row["on"]] += (row["end"] - row["start"]) * (row["kind"] == "waits")
    pair = max(waits, key=waits.get)
    longer = {name: works[pair[1], kind] - works[pair[0], kind] for name, kind in WORDS.items()}
    assert waiter != slow, f"Rank {waiter} doesn't wait for itself."
    most = f"Rank {pair[0]} waits {1e3 * waits[pair]:.0f} ms in all."
    assert waiter != pair[1], f"Rank {waiter} is the one that the others wait for. {most}"
    assert (waiter, slow) == pair, f"The recording has no rank {max(waiter, slow)}."
    assert word in WORDS, f"{word!r} is none of: {', '.join(WORDS)}."
    right = max(longer, key=longer.get)
    assert word == right, f"Compare the two ranks: they differ more in another part than in {word}."
    return f"A profile of rank {waiter} alone shows slow communication. The cause is in {right}, on rank {slow}."
