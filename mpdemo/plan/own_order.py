"""Simulate an order of your own: what each stage does, one after the other, such as ``["F0", "F1", "B0", "B1"]``.

F0 is the forward pass of microbatch 0, B0 its backward pass. The rule is that of `mpdemo.plan.simulate`, for one stage
per rank; an order that never ends is named with what every stage waits for. Taught in notebooks/05_pipeline.ipynb.
"""

import re

from mpdemo.errors import UserError


def simulate_order(orders, forward=1.0, backward=2.0) -> list[dict]:
    """Simulate a training step in which every stage works through its own list of operations.

    Parameters
    ----------
    orders : list of list of str
        One list per stage. Each holds F and B of every microbatch once.
    forward, backward : float
        Seconds of one operation, the same on all stages.

    Returns
    -------
    list of dict
        The timeline, as `mpdemo.timeline.read` describes it.

    Raises
    ------
    UserError
        A stage misses an operation, or has one twice; or a deadlock: every stage waits for another one.

    Examples
    --------
    >>> rows = simulate_order([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]])
    >>> max(row["end"] for row in rows)
    9.0
    """
    lanes = [[_read(stage, text) for text in texts] for stage, texts in enumerate(orders)]
    _check_complete(lanes)
    seconds, last = {"F": float(forward), "B": float(backward)}, len(lanes) - 1
    ends, position, rows = {}, [0] * len(lanes), []
    while any(place < len(lane) for place, lane in zip(position, lanes, strict=True)):
        before = len(rows)
        for stage, lane in enumerate(lanes):
            while position[stage] < len(lane) and all(need in ends for need in _needs(*lane[position[stage]], last)):
                kind, _, microbatch = operation = lane[position[stage]]
                previous = [lane[position[stage] - 1]] if position[stage] else []
                start = max([0.0, *(ends[need] for need in [*previous, *_needs(*operation, last)])])
                ends[operation] = end = start + seconds[kind]
                row = {"rank": stage, "stage": stage, "kind": kind, "microbatch": microbatch}
                rows.append({**row, "start": start, "end": end})
                position[stage] += 1
        if len(rows) == before:
            raise UserError(f"deadlock: {_waits(lanes, position, ends)}")
    return sorted(rows, key=lambda row: (row["rank"], row["start"]))


def _read(stage, text):
    """Return kind, stage and microbatch of an operation such as F0."""
    if not (match := re.fullmatch(r"([FB])(\d+)", str(text))):
        raise UserError(f"stage {stage} has {text!r}; allowed: F or B and the number of a microbatch, such as F0")
    return match[1], stage, int(match[2])


def _needs(kind, stage, microbatch, last):
    """Return the operations that must have ended before this one."""
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    return [("F", stage, microbatch)] + ([("B", stage + 1, microbatch)] if stage < last else [])


def _check_complete(lanes):
    """Refuse lists that are not F and B of the same microbatches, each once."""
    count = 1 + max((microbatch for lane in lanes for _, _, microbatch in lane), default=-1)
    if not count:
        raise UserError("there is no operation; write one list per stage, such as ['F0', 'B0']")
    for stage, lane in enumerate(lanes):
        wanted = [(kind, stage, microbatch) for kind in "FB" for microbatch in range(count)]
        for operation in wanted:
            if (times := lane.count(operation)) != 1:
                name = f"{operation[0]}{operation[2]}"
                raise UserError(f"stage {stage} has {name} {times} times; each operation is done once by each stage")


def _waits(lanes, position, ends):
    """Return what every stage that is not done waits for."""
    last, waits = len(lanes) - 1, []
    for stage, (lane, place) in enumerate(zip(lanes, position, strict=True)):
        if place < len(lane):
            kind, _, microbatch = lane[place]
            missing = next(need for need in _needs(*lane[place], last) if need not in ends)
            place_of_missing = "itself" if missing[1] == stage else f"stage {missing[1]}"
            waits.append(f"stage {stage} wants to do {kind}{microbatch}, and waits for {missing[0]}{missing[2]} of "
                         f"{place_of_missing}")  # fmt: skip
    return "; ".join(waits)
