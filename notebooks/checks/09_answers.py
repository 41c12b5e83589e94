"""Checks of notebook 09: exposed communication, the speed-up to a loss, a straggler in traces."""

import json
import math
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from mpdemo.measure.timeline import waiting
from mpdemo.notebook.player import recording


def close(value, right, tolerance=1e-6):
    return math.isclose(value, right, rel_tol=tolerance)


QUEUES = [  # ready (ms), MiB, latency (ms), bandwidth (MiB/ms), exposed (ms), what is special
    ([10, 20, 30], [8, 8, 8], 1, 4, 3, "Where each bucket is done before the next is ready"),
    ([10, 12, 14], [20, 20, 4], 1, 4, 10, "Where buckets are ready faster than they are sent"),
    ([10, 12, 40], [20, 20, 4], 1, 4, 2, "Where a gap lets the network catch up"),
    ([25], [25], 0.5, 10, 3, "With a single bucket"),
]


def check_09_2(exposed):
    for ready, mib, latency, bandwidth, right, where in QUEUES:
        got = exposed([*ready], [*mib], latency, bandwidth)
        whole = sum(latency + size / bandwidth for size in mib)
        assert got is not None, "It returns None."
        everything = f"{where}, it returns the time of all messages. Most of them hide behind the backward pass."
        assert len(mib) == 1 or not close(got, whole), everything
        late = f"{where}, it returns {got:g} ms: that is a moment, or counts from elsewhere than the last gradient."
        assert got < ready[-1] + right or close(got, right), late
        last = f"{where}, it returns {got:g} ms. The last bucket may have to wait until the one before it is sent."
        assert got >= right or close(got, right), last
        assert close(got, right), f"{where}, it returns {got:g} ms and not {right:g}."


STEPS = {  # a slow first and second step, and one that hit a hiccup; other numbers of skipped steps differ on 2 devices
    1: ([3.0, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5], 64, 1000),
    2: ([5.0, 0.9, 0.4, 0.35, 0.25, 0.2, 2.0], 64, 1000),
    4: ([9.0, 0.9, 0.6, 0.6, 0.6, 0.6, 0.6], 256, 400),
}


def speedups_of(skipped=2, average=median, of_step=lambda batch, needed: needed):
    """Return the speed-ups of `STEPS`, by default to the loss."""
    times = {n: average(s[skipped:]) * of_step(batch, needed) for n, (s, batch, needed) in STEPS.items()}
    return {n: times[1] / seconds for n, seconds in times.items()}


def check_09_3(speedups):
    runs = [
        {"devices": n, "seconds": [*seconds], "batch": batch, "needed": needed}
        for n, (seconds, batch, needed) in STEPS.items()
    ]
    result = speedups(runs)

    def is_like(values):
        return all(close(result[n], values[n], 1e-3) for n in (1, 2, 4))

    ways = [(skipped, how) for skipped in range(5) for how in (mean, median, min)]
    steps = [speedups_of(*way, lambda batch, needed: 1) for way in ways]
    assert not any(map(is_like, steps)), "It compares the time of a step. The run on 4 devices needs fewer of them."
    images = [speedups_of(*way, lambda batch, needed: 1 / batch) for way in ways]
    assert not any(map(is_like, images)), "It compares images per second. Four times the images aren't four steps."
    slow = [speedups_of(skipped, mean) for skipped in range(5)]
    assert not any(map(is_like, slow)), "One step of the run on 2 devices took 2 s, and a mean lets it count tenfold."
    assert not is_like(speedups_of(average=min)), "It counts the fastest step only. A run takes typical ones: a median."
    assert not any(is_like(speedups_of(s)) for s in (0, 1)), "It includes steps of the warm-up."
    assert not any(is_like(speedups_of(s)) for s in (3, 4)), "It leaves out more steps than the timing above."
    assert is_like(speedups_of()), f"It gives {result}; how long does each run take to the loss?"


PARTS = {"loading": 5, "forward": 90, "backward": 190, "Optimizer.step#SGD.step": 20}  # ms of a step
JITTER = 0.8, 0.9, 1.0, 1.0, 1.0, 1.1, 1.2, 30  # of the all-reduces of one rank; the last one is a hiccup
RUNS = [  # of each rank, the ms of a typical all-reduce in a healthy run and now; the straggler; what is special
    ([(20, 125), (20, 75), (20, 15), (20, 95)], 2, "For four ranks"),
    ([(60, 55), (10, 40), (15, 70)], 0, "For three ranks, of which rank 1 is always early"),
    ([(20, 22), (18, 17), (25, 21)], None, "For a healthy run"),
    ([(20, 120), (20, 90), (20, 110)], None, "For a run on a slow network"),
]


def trace(milliseconds, clock):
    """Return a trace as the profiler writes it, with such all-reduces, by a clock (s) of its own."""
    events, now = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}], clock * 1e6
    for times in JITTER:
        for name, length in (PARTS | {"gloo:all_reduce": milliseconds * times}).items():
            events.append({"ph": "X", "name": name, "ts": now, "dur": 1000 * length, "tid": 1})
            now += 1000 * length
    return {"schemaVersion": 1, "traceEvents": events}


def check_09_4(straggler):
    for ranks, right, which in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            runs = [[], []]
            for rank, each in enumerate(ranks):
                for paths, name, milliseconds in zip(runs, ("healthy", "trace"), each, strict=True):
                    paths.append(str(path := Path(folder, f"{name}_{rank}.json")))
                    path.write_text(json.dumps(trace(milliseconds, 100 + 5 * rank)))
            got = straggler(runs[1], runs[0])
        now, said = [milliseconds for _, milliseconds in ranks], f"{which} it returns {got!r}"
        assert right is not None or got is None, f"{said}, but there is no rank that is the only one not to wait."
        assert got != now.index(max(now)), f"{said}. This rank waits longest for the others."
        shortest = f"{said}. Its all-reduces are the shortest, but longer than its own in the healthy run: it waits."
        assert got == right or got != now.index(min(now)), shortest
        hiccup = "Count quarters: in each trace, one all-reduce took thirty times as long as the others."
        assert got == right, f"{said}, but rank {right} is the only one that doesn't wait. {hiccup}"


WORDS = {"forward": "F", "backward": "B", "optimizer": "O"}


def check_09_5(answer):
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
    assert (waiter, slow) == pair, f"There is no rank {max(waiter, slow)} in it."
    assert word in WORDS, f"{word!r} is none of: {', '.join(WORDS)}."
    right = max(longer, key=longer.get)
    assert word == right, f"Compare the two ranks: in another part they differ more than in {word}."
    return f"A profile of rank {waiter} alone shows slow communication. The cause is in {right}, on rank {slow}."
