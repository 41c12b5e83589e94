"""Say that nothing fits the memory, and what would."""

from dataclasses import replace

from mpdemo.errors import UserError
from mpdemo.plan.memory import RESERVE
from mpdemo.plan.planner import candidates, divisors


def refuse(job, nearest, **fixed):
    """Raise UserError: nothing fits; say what would.

    Parameters
    ----------
    nearest : Candidate
        The one that needs least.
    fixed
        `schedules` and `microbatches` that the user insists on, as for `candidates`; a `cut` is given up.
    """
    offers = []
    for more in (2, 4, 8):
        if job.ranks * more <= len(job.blocks) and _fits(replace(job, costs={}, ranks=job.ranks * more), fixed):
            offers.append(f"--stages {job.ranks * more}")
            break
    for less in (2, 4, 8, 16):
        if job.batch % less == 0 and _fits(replace(job, costs={}, batch=job.batch // less), fixed):
            offers.append(f"--batch {job.batch // less}")
            break
    needs = max(nearest.peaks) + RESERVE
    offers.insert(0, f"--gpu-memory {-(-needs // 2**30):.0f}GiB")
    raise UserError(
        f"no plan fits: {job.ranks} devices of {(job.limit + RESERVE) / 2**30:.3g} GiB (0.75 GiB of it for CUDA), "
        f"batch {job.batch}; the smallest found needs {needs / 2**30:.1f} GiB a device "
        f"({nearest.schedule}, {nearest.microbatches} microbatches); what would fit: {', or '.join(offers)}"
    )


def _fits(job, fixed):
    """Try what needs least memory: the smallest microbatches."""
    fixed = {**fixed, "microbatches": fixed.get("microbatches") or divisors(job)[-1:], "cut": None}
    return any(c.overflow(job.limit) == 0 for c in candidates(job, **fixed))
