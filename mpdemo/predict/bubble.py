"""The library's schedules: who computes what in which order, and the bubble in closed form.

The closed form is for stages of equal cost and no communication. `mpdemo.predict.simulate` does not use it; the tests
compare the two. P ranks, M microbatches, v stages per rank. Derived in notebooks/05_pipeline.ipynb.
"""

import re
from functools import cache
from types import SimpleNamespace

from mpdemo.errors import UserError
from mpdemo.settings.schedules import check_schedule, usual_stages_per_rank

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # stage, kind, microbatch, as PyTorch writes them


@cache
def order(schedule, ranks, microbatches, stages_per_rank=1) -> list:
    """Ask PyTorch for the operations of every rank: lists of (kind, stage, microbatch).

    F is the forward pass of a microbatch through a stage, B its backward pass. The zero-bubble schedules cut B in two:
    I, the gradient of the stage's input, which the stage before waits for, and W, the gradient of its weights, which
    fills gaps. The library decides all of that when a schedule is made, before it needs a process group.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        SimpleNamespace(group_size=ranks, group_rank=0, num_stages=ranks * stages_per_rank, stage_index=number,
                        is_first=number == 0, is_last=False, submod=None, has_backward=True)
        for number in range(stages_per_rank)
    ]  # fmt: skip
    made = get_schedule_class(schedule)(stages if stages_per_rank > 1 else stages[0], microbatches)
    matches = [[ACTION.fullmatch(str(action)) for action in made.pipeline_order[rank]] for rank in range(ranks)]
    lanes = [[(match[2], int(match[1]), int(match[3])) for match in lane if match] for lane in matches]
    return [_counted_from_zero(lane) for lane in lanes]


def _counted_from_zero(lane):
    """Repair the list of 1F1B's last rank, whose forwards PyTorch 2.14 numbers from 1 (it does not run by the list)."""
    first = min((microbatch for kind, _, microbatch in lane if kind == "F"), default=0)
    return [(kind, stage, microbatch - first * (kind == "F")) for kind, stage, microbatch in lane]


def idle_share(schedule, ranks, microbatches, stages_per_rank=None) -> float:
    """Return the share of all ranks' time that is idle; a `UserError` where no closed form holds.

    GPipe and 1F1B: (P-1) / (M+P-1), whatever forward and backward cost. Interleaved1F1B, where M is a multiple of P:
    (P-1) / (vM+P-1). The zero-bubble schedules, where forward, input gradient and weight gradient cost the same:
    (P-1) / (3vM+P-1), which is only the time in which the first microbatch reaches the last rank; ZBV from M = 2P-1 on.
    """
    schedule = check_schedule(schedule, ranks, microbatches)
    stages_per_rank = stages_per_rank or usual_stages_per_rank(schedule)
    rounds = not schedule.startswith("Interleaved") or microbatches % ranks == 0
    if not rounds or (schedule == "ZBVZeroBubble" and microbatches < 2 * ranks - 1):
        raise UserError(
            f"no closed form for {schedule} with {microbatches} microbatches on {ranks} ranks; allowed: multiples of "
            f"{ranks}, for ZBVZeroBubble {2 * ranks - 1} or more (simulate does the others)"
        )
    in_three = 3 if schedule.endswith("ZeroBubble") else 1
    return (ranks - 1) / (in_three * stages_per_rank * microbatches + ranks - 1)
