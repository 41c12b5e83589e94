"""The schedules of `torch.distributed.pipelining`, by the library's own names, and what each asks for.

Needs no PyTorch. Taught in notebooks/05_pipeline.ipynb.
"""

from dataclasses import dataclass

from mpdemo.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for."""

    stages_per_rank: int
    splits_backward: bool  # I and W instead of B
    placement: str  # "loop": rank r holds stages r, r+P, r+2P...; "v": rank r holds r and 2P-1-r


MOST_LISTED = 12  # valid values named in a message

SCHEDULES = {
    # all forwards, then all backwards (arXiv 1811.06965)
    "GPipe": Schedule(1, False, "loop"),
    # one forward, one backward: less memory (arXiv 1806.03377)
    "1F1B": Schedule(1, False, "loop"),
    # several stages per rank: a smaller bubble (arXiv 2104.04473)
    "Interleaved1F1B": Schedule(2, False, "loop"),
    # weight gradients fill the bubble (arXiv 2401.10241)
    "InterleavedZeroBubble": Schedule(2, True, "loop"),
    # stages placed as a V, almost no bubble (arXiv 2401.10241, section 6)
    "ZBVZeroBubble": Schedule(2, True, "v"),
}
PLAIN = {name.lower(): name for name in SCHEDULES}


def schedule_name(text) -> str:
    """Return PyTorch's name of a schedule, however its case and hyphens are written."""
    plain = str(text).lower().replace("-", "").replace("_", "")
    if plain not in PLAIN:
        raise UserError(f"unknown schedule {text!r}; allowed: {', '.join(SCHEDULES)}{did_you_mean(text, SCHEDULES)}")
    return PLAIN[plain]


def usual_stages_per_rank(schedule) -> int:
    """Return how many stages a rank holds with this schedule."""
    return SCHEDULES[schedule_name(schedule)].stages_per_rank


def placement(schedule, ranks, per_rank=None) -> list[int]:
    """Return the rank that holds each stage.

    Parameters
    ----------
    schedule : str
        One of `SCHEDULES`.
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
    >>> placement("Interleaved1F1B", 2), placement("ZBVZeroBubble", 2)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    stages = ranks * (per_rank or usual_stages_per_rank(schedule))
    if SCHEDULES[schedule_name(schedule)].placement == "v":
        return [min(s, stages - 1 - s) for s in range(stages)]
    return [s % ranks for s in range(stages)]


def check_schedule(schedule, ranks, microbatches, batch=None) -> str:
    """Refuse numbers that the library's schedule cannot run with, before anything is started; return its name."""
    schedule = schedule_name(schedule)
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{what} is {value!r}; allowed: whole numbers from 1")
    if batch is not None and batch % microbatches:
        divisors = [m for m in range(1, batch + 1) if batch % m == 0 and _runs(schedule, ranks, m)]
        raise UserError(
            f"a batch of {batch} does not divide into {microbatches} microbatches; allowed: {_some(divisors)}"
        )
    if _runs(schedule, ranks, microbatches):
        return schedule
    if schedule == "1F1B":
        raise UserError(
            f"1F1B needs at least as many microbatches as stages: {microbatches} microbatches on {ranks} stages; "
            f"allowed: {ranks} or more, or --schedule GPipe"
        )
    near = [m for m in range(1, 4 * ranks + microbatches) if _runs(schedule, ranks, m)]
    near = sorted(sorted(near, key=lambda m: abs(m - microbatches))[:MOST_LISTED])
    raise UserError(
        f"{schedule} works in rounds of about {ranks} microbatches, and {microbatches} don't divide into equal rounds; "
        f"allowed: any multiple of {ranks}, and near {microbatches}: {_some(near)}"
    )


def _runs(schedule, ranks, microbatches) -> bool:
    """Whether the library runs this many microbatches on this many ranks."""
    if schedule == "1F1B":
        return microbatches >= ranks
    if schedule.startswith("Interleaved"):
        return microbatches % max(1, microbatches // ranks) == 0
    return True


def _some(values) -> str:
    listed = ", ".join(map(str, values[:MOST_LISTED]))
    return listed + (", ..." if len(values) > MOST_LISTED else "")
