"""The order of work of a schedule, in the library's own notation."""

from mpdemo.plan.order import KINDS, order_arrays
from mpdemo.schedules import check_schedule


def order(schedule, rank, ranks, microbatches, stages_per_rank=None) -> list[str]:
    """One rank's operations as stage, kind and microbatch: ``0F0 0F1 0B0``."""
    stages_per_rank = check_schedule(schedule, ranks, microbatches, stages_per_rank)
    columns = order_arrays(schedule, rank, ranks, microbatches, stages_per_rank)
    return [f"{stage}{KINDS[kind]}{microbatch}" for kind, stage, microbatch in zip(*columns, strict=True)]
