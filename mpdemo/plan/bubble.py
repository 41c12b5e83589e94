"""The bubble in closed form, for stages of equal cost and no communication.

`mpdemo.plan.simulate` uses none of these formulas; the tests compare the two. P ranks, M microbatches, v stages per
rank. Derived in notebooks/05_pipeline.ipynb.
"""

from mpdemo.errors import UserError
from mpdemo.plan.simulate import check_stages
from mpdemo.schedules import check_schedule, usual_stages_per_rank


def idle_share(schedule, ranks, microbatches, stages_per_rank=None):
    """Return the share of all ranks' time that is idle, for equal stages and no communication.

    Parameters
    ----------
    schedule : str
        A name in SCHEDULES.
    ranks, microbatches : int
        P and M.
    stages_per_rank : int, optional
        v; the schedule's usual number by default.

    Returns
    -------
    float
        GPipe and 1F1B: (P-1) / (M+P-1), whatever forward and backward cost.
        Interleaved1F1B: (P-1) / (vM+P-1).
        The zero-bubble schedules, where forward, input gradient and weight gradient cost the same: (P-1) / (3vM+P-1),
        which is only the time in which the first microbatch reaches the last rank.

    Raises
    ------
    UserError
        Where no closed form holds: interleaved schedules need M to be a multiple of P, ZBV needs M >= 2P-1.
    """
    schedule = check_schedule(schedule, ranks, microbatches)
    stages_per_rank = stages_per_rank or usual_stages_per_rank(schedule)
    check_stages(schedule, stages_per_rank)
    fewest = 2 * ranks - 1
    if schedule.startswith("Interleaved") and microbatches % ranks:
        _refuse(schedule, ranks, microbatches, f"multiples of {ranks}")
    if schedule == "ZBVZeroBubble" and microbatches < fewest:
        _refuse(schedule, ranks, microbatches, f"{fewest} or more")
    in_three = 3 if schedule.endswith("ZeroBubble") else 1
    return (ranks - 1) / (in_three * stages_per_rank * microbatches + ranks - 1)


def _refuse(schedule, ranks, microbatches, allowed):
    raise UserError(
        f"no closed form for {schedule} with {microbatches} microbatches on {ranks} ranks; "
        f"allowed: {allowed} (simulate does the others)"
    )


def speedup(schedule, ranks, microbatches, stages_per_rank=None):
    """Return how many times faster than naive model parallelism (one rank busy at a time), for equal stages.

    Raises
    ------
    UserError
        As `idle_share`.
    """
    return ranks * (1 - idle_share(schedule, ranks, microbatches, stages_per_rank))
