"""The schedules of `torch.distributed.pipelining`, by the library's own names, and what each asks for.

Needs no PyTorch. Taught in notebooks/31_microbatches.ipynb.
"""

from dataclasses import dataclass
from math import isqrt

from mpdemo.errors import QUOTED, UserError, did_you_mean


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for."""

    stages_per_rank: int
    splits_backward: bool  # I and W instead of B
    placement: str  # "loop": rank r holds stages r, r+P, r+2P...; "v": rank r holds r and 2P-1-r


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
        allowed = f"{', '.join(SCHEDULES)}{did_you_mean(text, SCHEDULES)}"
        raise UserError(f"unknown schedule {QUOTED.repr(text)}; allowed: {allowed}")
    return PLAIN[plain]


def usual_stages_per_rank(schedule: str) -> int:
    """Return how many stages a rank holds with a `schedule`."""
    return SCHEDULES[schedule_name(schedule)].stages_per_rank


def placement(schedule: str, ranks: int, per_rank: int | None = None) -> list[int]:
    """Return which of the `ranks` holds each stage; `per_rank` stages each, by default as usual for the `schedule`.

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
    if not isinstance(microbatches, int) or microbatches < 1:
        raise UserError(f"{microbatches!r} microbatches; allowed: a whole number from 1")
    if batch is not None and batch % microbatches:
        possible = [m for m in divisors(batch) if _runs(schedule, ranks, m)]
        allowed = ", ".join(map(str, possible[:12])) or "none; give another batch size"
        raise UserError(
            f"a batch of {batch} does not divide into {microbatches} microbatches; allowed: {allowed}"
        )
    if not _runs(schedule, ranks, microbatches):
        needs, allowed = "rounds of equally many microbatches", f"any multiple of {ranks}"
        if schedule == "1F1B":
            needs, allowed = (
                "at least as many microbatches as stages",
                f"{ranks} or more, or --schedule GPipe",
            )
        raise UserError(
            f"{schedule} needs {needs}, not {microbatches} on {ranks} ranks; allowed: {allowed}"
        )
    return schedule


def divisors(number) -> list:
    """Return all divisors of a number, in order."""
    return sorted(
        {d for part in range(1, isqrt(number) + 1) if number % part == 0 for d in (part, number // part)}
    )


def _runs(schedule, ranks, microbatches) -> bool:
    """Whether the library runs this many microbatches on this many ranks."""
    if schedule == "1F1B":
        return microbatches >= ranks
    return not schedule.startswith("Interleaved") or microbatches % max(1, microbatches // ranks) == 0
