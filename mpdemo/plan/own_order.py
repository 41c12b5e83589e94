"""Simulate an order of your own: what each stage does, one after the other, such as ``["F0", "F1", "B0", "B1"]``.

F0 is the forward pass of microbatch 0, B0 its backward pass. An order that never ends is named with what every stage
waits for. Taught in notebooks/05_pipeline.ipynb.
"""

import re

from mpdemo.errors import UserError
from mpdemo.plan.simulate import play


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
    return play(lanes, {"F": [forward] * len(lanes), "B": [backward] * len(lanes)}, [0.0] * (len(lanes) - 1))


def _read(stage, text):
    """Return kind, stage and microbatch of an operation such as F0."""
    if not (match := re.fullmatch(r"([FB])(\d+)", str(text))):
        raise UserError(f"stage {stage} has {text!r}; allowed: F or B and the number of a microbatch, such as F0")
    return match[1], stage, int(match[2])


def _check_complete(lanes):
    """Refuse lists that are not F and B of the same microbatches, each once."""
    count = 1 + max((microbatch for lane in lanes for _, _, microbatch in lane), default=-1)
    if not count:
        raise UserError("there is no operation; write one list per stage, such as ['F0', 'B0']")
    for stage, lane in enumerate(lanes):
        for kind, microbatch in ((kind, microbatch) for kind in "FB" for microbatch in range(count)):
            if (times := lane.count((kind, stage, microbatch))) != 1:
                raise UserError(f"stage {stage} has {kind}{microbatch} {times} times; each operation is done once")
