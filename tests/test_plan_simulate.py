"""The simulated timeline obeys the rules of a pipeline, and agrees with the closed forms and a second simulation."""

import random
import subprocess
import sys

import pytest

from mpdemo.errors import UserError
from mpdemo.plan import SCHEDULES, bubble, placement, simulate

SHAPES = [
    ("GPipe", 2, 1, 1), ("GPipe", 3, 5, 1), ("GPipe", 4, 2, 1), ("1F1B", 2, 2, 1), ("1F1B", 4, 7, 1),
    ("Interleaved1F1B", 2, 4, 2), ("Interleaved1F1B", 3, 6, 3), ("Interleaved1F1B", 4, 3, 2),
    ("InterleavedZeroBubble", 2, 4, 2), ("InterleavedZeroBubble", 3, 6, 3), ("InterleavedZeroBubble", 4, 3, 2),
    ("ZBVZeroBubble", 2, 1, 2), ("ZBVZeroBubble", 3, 6, 2), ("ZBVZeroBubble", 4, 8, 2),
]  # fmt: skip


def uneven(schedule, ranks, microbatches, stages_per_rank):
    """Simulate stages whose times are all different, with communication."""
    draw = random.Random(f"{schedule}{ranks}{microbatches}")
    stages = ranks * stages_per_rank
    forward, backward = ([draw.uniform(0.5, 3) for _ in range(stages)] for _ in range(2))
    weight = [draw.uniform(0.2, 0.8) for _ in range(stages)]
    communication = [draw.uniform(0, 0.5) for _ in range(stages - 1)]
    return simulate(schedule, forward, backward, microbatches, ranks, weight, communication), communication


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_no_rank_does_two_things_at_once_and_nothing_starts_before_its_input_is_there(shape):
    result, communication = uneven(*shape)
    stages, owners = shape[1] * shape[3], placement(shape[0], shape[1], shape[3])
    end = {(row["kind"].replace("I", "B"), row["stage"], row["microbatch"]): row["end"] for row in result.events}
    previous = None
    for row in result.events:
        if previous and previous["rank"] == row["rank"]:
            assert row["start"] >= previous["end"]
        previous, stage, microbatch = row, row["stage"], row["microbatch"]
        assert row["rank"] == owners[stage]
        if row["kind"] == "F" and stage > 0:
            delay = communication[stage - 1] if owners[stage] != owners[stage - 1] else 0
            assert row["start"] >= end["F", stage - 1, microbatch] + delay - 1e-9
        if row["kind"] in "BI":
            assert row["start"] >= end["F", stage, microbatch] - 1e-9
            if stage < stages - 1:
                delay = communication[stage] if owners[stage] != owners[stage + 1] else 0
                assert row["start"] >= end["B", stage + 1, microbatch] + delay - 1e-9
        if row["kind"] == "W":
            assert row["start"] >= end["B", stage, microbatch] - 1e-9


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_nothing_starts_later_than_it_must(shape):
    """Event by event with a plain dictionary: slow, obvious, and the same times."""
    result, communication = uneven(*shape)
    owners = placement(shape[0], shape[1], shape[3])
    queues = [[row for row in result.events if row["rank"] == rank] for rank in range(shape[1])]
    free, end = [0.0] * shape[1], {}
    while any(queues):
        progressed = False
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            row = queue[0]
            step = {"F": -1, "W": None}.get(row["kind"], 1)
            other = None if step is None else row["stage"] + step
            arrives = 0.0
            if other is not None and 0 <= other < len(owners):
                if (row["kind"].replace("I", "B"), other, row["microbatch"]) not in end:
                    continue
                delay = communication[min(other, row["stage"])] if owners[other] != rank else 0.0
                arrives = end[row["kind"].replace("I", "B"), other, row["microbatch"]] + delay
            begin = max(arrives, free[rank])
            assert row["start"] == pytest.approx(begin)
            free[rank] = end[row["kind"].replace("I", "B"), row["stage"], row["microbatch"]] = row["end"]
            queue.pop(0)
            progressed = True
        assert progressed


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_equal_stages_idle_as_the_closed_form_says(schedule, ranks):
    usual = SCHEDULES[schedule].stages_per_rank
    for stages_per_rank in (usual, 3) if "Interleaved" in schedule else (usual,):
        for microbatches in (2 * ranks, 4 * ranks, 10 * ranks):
            stages = ranks * stages_per_rank
            result = simulate(schedule, [1.0] * stages, [2.0] * stages, microbatches, ranks, weight=0.5)
            expected = bubble.idle_share(schedule, ranks, microbatches, stages_per_rank)
            assert result.idle_share == pytest.approx(expected)
            naive = 3.0 * stages * microbatches  # every microbatch crosses every stage, one rank busy at a time
            assert naive / result.step_time == pytest.approx(
                bubble.speedup(schedule, ranks, microbatches, stages_per_rank)
            )


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("backward_over_forward", [0.5, 1, 2, 3.7])
def test_the_bubble_of_gpipe_and_1f1b_does_not_depend_on_what_backward_costs(schedule, backward_over_forward):
    result = simulate(schedule, [1.0] * 4, [backward_over_forward] * 4, microbatches=6, ranks=4)
    assert result.idle_share == pytest.approx(3 / 9)


def test_naive_model_parallelism_keeps_one_device_busy_at_a_time():
    result = simulate("GPipe", [1, 2, 3], [2, 4, 6], microbatches=1, ranks=3)
    assert result.step_time == 18
    assert result.idle_share == pytest.approx(2 / 3)


def test_1f1b_holds_as_many_microbatches_as_stages_remain_and_gpipe_holds_them_all():
    assert simulate("1F1B", [1] * 4, [2] * 4, 12, 4).peak_activations == [4, 3, 2, 1]
    assert simulate("GPipe", [1] * 4, [2] * 4, 12, 4).peak_activations == [12] * 4
    zbv = simulate("ZBVZeroBubble", [1] * 8, [2] * 8, 12, 4)
    assert max(zbv.peak_activations) <= 2 * 4  # half-sized stages: no more memory than 1f1b


def test_the_first_stage_computes_its_whole_backward_with_the_weights():
    result = simulate("ZBVZeroBubble", [1] * 4, [2] * 4, 4, 2)
    seconds = {(row["kind"], row["stage"]): row["end"] - row["start"] for row in result.events}
    assert seconds["I", 0] == 0
    assert seconds["W", 0] == 2
    assert seconds["I", 1] == seconds["W", 1] == 1


def test_communication_delays_only_between_ranks():
    with_delay = simulate("GPipe", [1, 1], [2, 2], 1, 2, communication=0.25)
    assert with_delay.step_time == 6.5
    v = simulate("ZBVZeroBubble", [1] * 4, [2] * 4, 1, 2, weight=0.5, communication=0.25)
    turn = {(row["kind"], row["stage"]): row for row in v.events}
    assert turn["F", 2]["start"] == turn["F", 1]["end"]  # the bottom of the V: both stages on rank 1
    assert turn["F", 1]["start"] == turn["F", 0]["end"] + 0.25


def test_lists_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="multiple of 2 stages"):
        simulate("GPipe", [1, 1, 1], [1, 1, 1], 2, 2)
    with pytest.raises(UserError, match="3 forward and 2 backward"):
        simulate("GPipe", [1, 1, 1], [1, 1], 2, 3)


def test_planning_needs_no_torch():
    code = (
        "import sys, mpdemo.plan, mpdemo.plan.bubble; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
