"""What a rank's steps are made of, from the events that PyTorch's own profiler recorded.

The profiler has a range for each operation of the thread that trains (``aten::``), for each piece of the backward pass,
and for the optimizer's step. gloo's threads enter a range for every transfer (``gloo:all_reduce``), from the moment at
which they take it up until its end: it contains the wait for the other ranks. The profiler can't tell how much of a
transfer is such a wait, nor that gloo's threads compute on the same cores. Taught in notebooks/09_scaling.ipynb.
Source: https://docs.pytorch.org/docs/stable/profiler.html.
"""

from statistics import mean

import numpy as np
from torch.profiler import ProfilerActivity, profile

STEP, LOADING = "mpdemo: step", "mpdemo: loading"  # ranges that the lab marks itself
BACKWARD, OPTIMIZER, OPERATION = "autograd::engine::evaluate_function", "Optimizer.step#", "aten::"
TRANSFER = "gloo:"


def recording():
    """Return the profiler: a ``with`` block whose steps are marked with `STEP`, their loading with `LOADING`."""
    return profile(activities=[ProfilerActivity.CPU])


def steps_of(recorded) -> list[dict]:
    """Reduce the events of a recording that has ended to the parts of every step; see `parts`."""
    events = [(event.name, event.thread, event.time_range.start, event.time_range.end) for event in recorded.events()]
    return [parts(events, thread, (begin, end)) for name, thread, begin, end in events if name == STEP]


def mean_step(steps) -> dict:
    """Return the mean of every part. A median step would be another one in each rank, and their bars would differ."""
    return {part: mean(step[part] for step in steps) for part in steps[0]}


def parts(events, thread, step) -> dict:
    """Divide one step, (begin, end), among what the training thread did in it; events (name, thread, begin, end) in µs.

    In seconds: `loading`, `forward`, `backward`, `optimizer`, `exposed` (communication while the thread had nothing
    else to do) and `other` (Python between operations) are the whole step; `hidden` is the communication during the
    other parts.
    """
    edges = np.unique(np.clip([*step, *(time for event in events for time in event[2:])], *step))
    seconds = np.diff(edges) / 1e6  # of each piece
    free = np.ones(len(edges) - 1, bool)  # pieces that are not yet explained

    def during(name, threads):
        """Return in which pieces some event of this name lasts."""
        found = np.zeros(len(edges) - 1, bool)
        for event, number, begin, end in events:
            if event.startswith(name) and (number == thread or threads == "all"):
                found[np.searchsorted(edges, begin) : np.searchsorted(edges, end)] = True
        return found

    spans = {"loading": LOADING, "optimizer": OPTIMIZER, "backward": BACKWARD, "forward": OPERATION}
    result = {}
    for part, name in spans.items():  # what lasts within another part belongs to the first
        inside = free & during(name, "its own")
        result[part], free = seconds[inside].sum(), free & ~inside
    transfers = during(TRANSFER, "all")
    result["exposed"] = seconds[free & transfers].sum()
    result["other"] = seconds[free & ~transfers].sum()
    return result | {"hidden": seconds[transfers & ~free].sum()}
