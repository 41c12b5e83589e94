"""Our orders are the library's: the same operations, in the same order, on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpdemo.errors import UserError
from mpdemo.predict.simulate import order
from mpdemo.settings.schedules import SCHEDULES, check_schedule, placement

CASES = [
    (schedule, ranks, microbatches, stages)
    for schedule, rule in SCHEDULES.items()
    for ranks, microbatches in ((2, 4), (3, 6), (4, 4), (2, 1), (3, 2), (3, 4), (3, 5))
    for stages in ((2, 3) if "Interleaved" in schedule else (rule.stages_per_rank,))
]


METHODS = {"F": "forward_one_chunk", "B": "backward_one_chunk", "W": "backward_weight_one_chunk"}


def note(stage, seen):
    """Note every chunk that the library asks a stage to compute."""

    def noting(kind, method):
        def noted(chunk, *args, **kwargs):
            split = kind == "B" and not kwargs.get("full_backward", True)
            seen.append(f"{stage.stage_index}{'I' if split else kind}{chunk}")
            return method(chunk, *args, **kwargs)

        return noted

    for kind, name in METHODS.items():
        setattr(stage, name, noting(kind, getattr(stage, name)))
    return stage


def library(schedule, rank, ranks, microbatches, stages_per_rank):
    """Run one rank of a real library schedule: PyTorch's fake process group delivers nothing and waits for nothing."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        seen, owners = [], placement(schedule, ranks, stages_per_rank)
        sample = {name: (torch.zeros(2, 4, requires_grad=True),) for name in ("input_args", "output_args")}
        place = (len(owners), torch.device("cpu"))
        numbers = [number for number, owner in enumerate(owners) if owner == rank]
        stages = [
            note(PipelineStage(torch.nn.Linear(4, 4), number, *place, **sample), seen) for number in numbers
        ]
        stages = stages if stages_per_rank > 1 else stages[0]
        runner = get_schedule_class(schedule)(stages, microbatches, loss_fn=torch.nn.functional.mse_loss)
        batch = torch.zeros(2 * microbatches, 4)
        runner.step(*((batch,) if owners[0] == rank else ()), target=batch, losses=[])
        return seen
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("schedule", "ranks", "microbatches", "stages"), CASES)
def test_the_order_is_the_one_that_the_library_runs_and_both_refuse_alike(
    schedule, ranks, microbatches, stages
):
    try:
        check_schedule(schedule, ranks, microbatches)
    except UserError:
        with pytest.raises(ValueError, match="microbatches"):
            library(schedule, 0, ranks, microbatches, stages)
        return
    for rank, lane in enumerate(order(schedule, ranks, microbatches, stages)):
        ours = [f"{stage}{kind}{microbatch}" for kind, stage, microbatch in lane]
        assert library(schedule, rank, ranks, microbatches, stages) == ours


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1F1B", 4, 2), "4 or more"),
        (("GPipe", 2, 3, 32), "1, 2, 4, 8, 16, 32"),
        (("Interleaved1F1B", 2, 5), "multiple of 2"),
        (("1F1B", 2, 3, 8), "2, 4, 8"),
        (("Interleaved1F1", 2, 4), "did you mean 'Interleaved1F1B'"),
        (("zb-v", 2, 4), "GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble"),
    ],
)
def test_bad_numbers_are_refused_in_one_line_with_the_valid_ones(arguments, message):
    with pytest.raises(UserError) as refusal:
        check_schedule(*arguments)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
