"""The five schedules that `torch.distributed.pipelining` and this course share: what each asks for.

Taught in notebooks/05_pipeline.ipynb.
"""

import difflib
from dataclasses import dataclass

from mpdemo.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for, and what the library calls it."""

    library_class: str
    stages_per_rank: int  # the number it uses unless told otherwise
    splits_backward: bool  # I and W instead of B
    placement: str  # "loop": rank r holds stages r, r+P, r+2P...; "v": rank r holds r and 2P-1-r
    summary: str


SCHEDULES = {
    "naive": Schedule("ScheduleGPipe", 1, False, "loop", "one microbatch: one device busy at a time"),
    "gpipe": Schedule("ScheduleGPipe", 1, False, "loop", "all forwards, then all backwards (arXiv 1811.06965)"),
    "1f1b": Schedule("Schedule1F1B", 1, False, "loop", "one forward, one backward: less memory (arXiv 2104.04473)"),
    "interleaved-1f1b": Schedule(
        "ScheduleInterleaved1F1B", 2, False, "loop", "several stages a rank: a smaller bubble (arXiv 2104.04473)"
    ),
    "interleaved-zero-bubble": Schedule(
        "ScheduleInterleavedZeroBubble", 2, True, "loop", "weight gradients fill the bubble (arXiv 2401.10241)"
    ),
    "zbv": Schedule("ScheduleZBVZeroBubble", 2, True, "v", "stages placed as a V, almost no bubble (arXiv 2401.10241)"),
}


def stages_per_rank(schedule):
    """Return how many stages a rank holds with this schedule, unless told otherwise.

    Raises
    ------
    UserError
        Not the name of a schedule.
    """
    if schedule not in SCHEDULES:
        close = difflib.get_close_matches(str(schedule).lower(), SCHEDULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"unknown schedule {schedule!r}; allowed: {', '.join(SCHEDULES)}{hint}")
    return SCHEDULES[schedule].stages_per_rank


def placement(schedule, ranks, per_rank=None):
    """Return the rank that holds each stage.

    Parameters
    ----------
    schedule : str
        A name in SCHEDULES.
    ranks : int
        P.
    per_rank : int, optional
        Stages a rank, v; the schedule's usual number by default. The model is cut into P * v stages.

    Returns
    -------
    list of int
        Entry s is the rank of stage s.

    Examples
    --------
    >>> placement("interleaved-1f1b", 2), placement("zbv", 2)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    stages = ranks * (per_rank or stages_per_rank(schedule))
    if SCHEDULES[schedule].placement == "v":
        return [min(s, stages - 1 - s) for s in range(stages)]
    return [s % ranks for s in range(stages)]
