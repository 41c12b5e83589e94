"""The schedules that `torch.distributed.pipelining` and this course share: what each asks for.

Taught in notebooks/05_pipeline.ipynb.
"""

from dataclasses import dataclass

from mpdemo.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for."""

    stages_per_rank: int  # the number it uses by default
    splits_backward: bool  # I and W instead of B
    placement: str  # "loop": rank r holds stages r, r+P, r+2P...; "v": rank r holds r and 2P-1-r


MOST_LISTED = 12  # valid values named in a message

SCHEDULES = {
    # one microbatch: one device busy at a time
    "naive": Schedule(1, False, "loop"),
    # all forwards, then all backwards (arXiv 1811.06965)
    "gpipe": Schedule(1, False, "loop"),
    # one forward, one backward: less memory (arXiv 1806.03377)
    "1f1b": Schedule(1, False, "loop"),
    # several stages per rank: a smaller bubble (arXiv 2104.04473)
    "interleaved-1f1b": Schedule(2, False, "loop"),
    # weight gradients fill the bubble (arXiv 2401.10241)
    "interleaved-zero-bubble": Schedule(2, True, "loop"),
    # stages placed as a V, almost no bubble (arXiv 2401.10241, section 6)
    "zbv": Schedule(2, True, "v"),
}


def usual_stages_per_rank(schedule):
    """Return how many stages a rank holds with this schedule by default.

    Raises
    ------
    UserError
        Not the name of a schedule.
    """
    if schedule not in SCHEDULES:
        hint = did_you_mean(schedule, SCHEDULES)
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
        Stages per rank, v; the schedule's usual number by default. The model is cut into P * v stages.

    Returns
    -------
    list of int
        Entry s is the rank of stage s.

    Examples
    --------
    >>> placement("interleaved-1f1b", 2), placement("zbv", 2)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    stages = ranks * (per_rank or usual_stages_per_rank(schedule))
    if SCHEDULES[schedule].placement == "v":
        return [min(s, stages - 1 - s) for s in range(stages)]
    return [s % ranks for s in range(stages)]


def check_schedule(schedule, ranks, microbatches, stages_per_rank=None, batch=None):
    """Check that a schedule can run with these numbers; nothing is started.

    Parameters
    ----------
    schedule : str
        A name in SCHEDULES.
    ranks : int
        Processes of the pipeline, P.
    microbatches : int
        Parts the batch is cut into, M.
    stages_per_rank : int, optional
        Stages each process holds, v. By default the schedule's usual number.
    batch : int, optional
        Samples in the global batch; must be a multiple of the number of microbatches.

    Returns
    -------
    int
        The number of stages per rank.

    Raises
    ------
    UserError
        One line: what is wrong, its value, the values allowed.
    """
    usual = usual_stages_per_rank(schedule)
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{what} is {value!r}; allowed: whole numbers from 1")
    if stages_per_rank is None:
        stages_per_rank = usual
    _check_stages_per_rank(schedule, stages_per_rank)
    if batch is not None and batch % microbatches:
        divisors = [m for m in range(1, batch + 1) if batch % m == 0 and _runs(schedule, ranks, m)]
        raise UserError(
            f"a batch of {batch} does not divide into {microbatches} microbatches; allowed: {_some(divisors)}"
        )
    if not _runs(schedule, ranks, microbatches):
        _refuse_microbatches(schedule, ranks, microbatches)
    return stages_per_rank


def _check_stages_per_rank(schedule, stages_per_rank):
    usual = SCHEDULES[schedule].stages_per_rank
    several = schedule.startswith("interleaved")
    if several and not (isinstance(stages_per_rank, int) and stages_per_rank >= 2):
        raise UserError(f"{schedule} needs several stages per rank, not {stages_per_rank}; allowed: 2 or more")
    if not several and stages_per_rank != usual:
        count = "1 stage" if usual == 1 else f"{usual} stages"
        others = ", ".join(name for name in SCHEDULES if name.startswith("interleaved"))
        raise UserError(
            f"{schedule} runs with exactly {count} per rank, not {stages_per_rank}; "
            f"allowed: {usual}, or another number of stages with {others}"
        )


def _runs(schedule, ranks, microbatches):
    """Return whether the library runs this many microbatches on this many ranks."""
    if schedule == "naive":
        return microbatches == 1
    if schedule == "1f1b":
        return microbatches >= ranks
    if schedule.startswith("interleaved"):
        return microbatches % max(1, microbatches // ranks) == 0
    return True


def _refuse_microbatches(schedule, ranks, microbatches):
    if schedule == "naive":
        raise UserError(f"naive runs the whole batch at once, not {microbatches} microbatches; allowed: 1")
    if schedule == "1f1b":
        raise UserError(
            f"1f1b needs at least as many microbatches as stages: {microbatches} microbatches on {ranks} stages; "
            f"allowed: {ranks} or more, or --schedule gpipe"
        )
    near = [m for m in range(1, 4 * ranks + microbatches) if _runs(schedule, ranks, m)]
    near = sorted(sorted(near, key=lambda m: abs(m - microbatches))[:MOST_LISTED])
    raise UserError(
        f"{schedule} works in rounds of about {ranks} microbatches and {microbatches} do not divide into equal rounds; "
        f"allowed: any multiple of {ranks}, and near {microbatches}: {_some(near)}"
    )


def _some(values):
    listed = ", ".join(map(str, values[:MOST_LISTED]))
    return listed + (", ..." if len(values) > MOST_LISTED else "")
