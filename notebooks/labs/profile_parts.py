"""What a rank's steps are made of, from the events that PyTorch's own profiler recorded.

The profiler has a range for each operation of the thread that trains (``aten::``), for each piece of the backward pass,
and for the optimizer's step. gloo's threads enter a range for every transfer (``gloo:all_reduce``), from the moment at
which they take it up until its end: it contains the wait for the other ranks. The profiler can't tell how much of a
transfer is such a wait, nor that gloo's threads compute on the same cores. Taught in notebooks/08_scaling.ipynb.
Source: https://docs.pytorch.org/docs/stable/profiler.html.
"""

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


def parts(events, thread, step) -> dict:
    """Divide one step, (begin, end), among what the training thread did in it; events (name, thread, begin, end) in µs.

    In seconds: `loading`, `forward`, `backward`, `optimizer`, `exposed` (communication while the thread had nothing
    else to do) and `other` (Python between operations) are the whole step; `hidden` is the communication during the
    other parts.
    """
    own = [event for event in events if event[1] == thread]
    loading, optimizer, backward, operations = (
        within(step, [event[2:] for event in own if event[0].startswith(name)])
        for name in (LOADING, OPTIMIZER, BACKWARD, OPERATION)
    )
    transfers = within(step, [event[2:] for event in events if event[0].startswith(TRANSFER)])
    optimizer = subtract(optimizer, loading)
    backward = subtract(backward, loading + optimizer)
    forward = subtract(operations, loading + optimizer + backward)
    busy = loading + optimizer + backward + forward
    exposed = subtract(transfers, busy)
    other = subtract([step], busy + transfers)
    spans = {"loading": loading, "forward": forward, "backward": backward}
    spans |= {"optimizer": optimizer, "exposed": exposed}
    seconds = {name: length(ranges) / 1e6 for name, ranges in (spans | {"other": other}).items()}
    return seconds | {"hidden": (length(transfers) - length(exposed)) / 1e6}


def within(step, spans) -> list[tuple]:
    """Return what lies in a step of ranges that may overlap, as ranges in order that don't."""
    result = []
    for begin, end in sorted((max(begin, step[0]), min(end, step[1])) for begin, end in spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif end > begin:
            result.append((begin, end))
    return result


def subtract(spans, others) -> list[tuple]:
    """Return what is left of ranges in order without the `others`, which may overlap."""
    result = []
    others = within((-float("inf"), float("inf")), others)
    for begin, end in spans:
        for cut_from, cut_to in others:
            if cut_to > begin and cut_from < end:
                if cut_from > begin:
                    result.append((begin, cut_from))
                begin = max(begin, cut_to)
        if begin < end:
            result.append((begin, end))
    return result


def length(spans):
    """Return the length of ranges together."""
    return sum(end - begin for begin, end in spans)
