"""Our orders are the library's: the same operations, in the same order, on every rank."""

import re

import pytest
from orders import order

from mpdemo.errors import UserError
from mpdemo.parallel.per_device import SCHEDULE_CLASSES
from mpdemo.plan import SCHEDULES, placement
from mpdemo.schedules import check_schedule

CASES = [
    (schedule, ranks, microbatches, stages)
    for schedule, rule in SCHEDULES.items()
    for ranks in (2, 3, 4)
    for microbatches in (1, 2, 3, 4, 6, 8)
    for stages in ((rule.stages_per_rank, 3) if "interleaved" in schedule else (rule.stages_per_rank,))
]


class NotedStage:
    """Notes every chunk that the library asks a stage to compute."""

    def __init__(self, stage, seen):
        for kind, method in (
            ("F", "forward_one_chunk"),
            ("B", "backward_one_chunk"),
            ("W", "backward_weight_one_chunk"),
        ):
            setattr(stage, method, self.noting(stage, kind, getattr(stage, method), seen))

    @staticmethod
    def noting(stage, kind, method, seen):
        def noted(chunk, *args, **kwargs):
            split = kind == "B" and not kwargs.get("full_backward", True)
            seen.append(f"{stage.stage_index}{'I' if split else kind}{chunk}")
            return method(chunk, *args, **kwargs)

        return noted


@pytest.fixture
def library():
    """Run one rank of a real library schedule: PyTorch's fake process group delivers nothing and waits for nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def run(schedule, rank, ranks, microbatches, stages_per_rank):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            seen, sample = [], torch.zeros(2, 4, requires_grad=True)
            owners = placement(schedule, ranks, stages_per_rank)
            stages = [
                pipelining.PipelineStage(
                    torch.nn.Linear(4, 4),
                    s,
                    len(owners),
                    torch.device("cpu"),
                    input_args=(sample,),
                    output_args=(sample,),
                )
                for s in range(len(owners))
                if owners[s] == rank
            ]
            for stage in stages:
                NotedStage(stage, seen)
            several = "interleaved" in schedule or schedule == "zbv"
            runner = SCHEDULE_CLASSES[schedule](
                stages if several else stages[0], n_microbatches=microbatches, loss_fn=torch.nn.functional.mse_loss
            )
            batch = torch.zeros(2 * microbatches, 4)
            runner.step(*((batch,) if owners[0] == rank else ()), target=batch, losses=[])
            return seen
        finally:
            dist.destroy_process_group()

    return run


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_orders_are_those_that_the_library_runs(library, schedule):
    compared = 0
    for _, ranks, microbatches, stages in (case for case in CASES if case[0] == schedule):
        try:
            check_schedule(schedule, ranks, microbatches, stages)
        except UserError:
            continue
        for rank in range(ranks):
            ours = order(schedule, rank, ranks, microbatches, stages)
            assert library(schedule, rank, ranks, microbatches, stages) == ours
            compared += 1
    assert compared >= (9 if schedule == "naive" else 20)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_we_refuse_the_library_refuses_too(library, schedule):
    for _, ranks, microbatches, stages in (case for case in CASES if case[0] == schedule):
        try:
            check_schedule(schedule, ranks, microbatches, stages)
        except UserError:
            if schedule == "naive":  # our name for GPipe with one microbatch
                assert microbatches > 1
                continue
            with pytest.raises(ValueError, match="microbatches"):
                library(schedule, 0, ranks, microbatches, stages)


@pytest.mark.parametrize("schedule, ranks, microbatches, stages", CASES)
def test_every_microbatch_passes_every_stage_once_each_way(schedule, ranks, microbatches, stages):
    try:
        orders = [order(schedule, rank, ranks, microbatches, stages) for rank in range(ranks)]
    except UserError:
        return
    owners = placement(schedule, ranks, stages)
    kinds = "FIW" if SCHEDULES[schedule].splits_backward else "FB"
    expected = {f"{s}{kind}{m}" for kind in kinds for s in range(ranks * stages) for m in range(microbatches)}
    assert sorted(op for ops in orders for op in ops) == sorted(expected)
    assert all(owners[int(re.match(r"\d+", op)[0])] == rank for rank, ops in enumerate(orders) for op in ops)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f1b", 4, 2), "4 or more"),
        (("gpipe", 2, 0), "whole numbers from 1"),
        (("gpipe", 2, 3, None, 32), "1, 2, 4, 8, 16, 32"),
        (("gpipe", 2, 4, 2), "exactly 1 stage per rank, not 2"),
        (("zbv", 2, 4, 3), "exactly 2 stages per rank, not 3"),
        (("interleaved-1f1b", 2, 4, 1), "2 or more"),
        (("interleaved-1f1b", 2, 5), "multiple of 2"),
        (("1f1b", 2, 3, 1, 8), "2, 4, 8"),
        (("1f1bb", 2, 4), "did you mean '1f1b'"),
        (("zb-v", 2, 4), "naive, gpipe, 1f1b, interleaved-1f1b, interleaved-zero-bubble, zbv"),
    ],
)
def test_bad_numbers_are_refused_in_one_line_with_the_valid_ones(arguments, message):
    with pytest.raises(UserError) as refusal:
        check_schedule(*arguments)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
