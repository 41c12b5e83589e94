"""The simulated timeline obeys the rules of a pipeline and agrees with the closed forms; an order of your own does."""

import random

import pytest

from mpdemo.errors import UserError
from mpdemo.predict import SCHEDULES, simulate
from mpdemo.predict.simulate import order, simulate_order
from mpdemo.settings.schedules import placement

SHAPES = [
    ("GPipe", 2, 1, 1), ("GPipe", 3, 5, 1), ("GPipe", 4, 2, 1), ("1F1B", 2, 2, 1), ("1F1B", 4, 7, 1),
    ("Interleaved1F1B", 2, 4, 2), ("Interleaved1F1B", 3, 6, 3), ("Interleaved1F1B", 4, 3, 2),
    ("InterleavedZeroBubble", 2, 4, 2), ("InterleavedZeroBubble", 3, 6, 3), ("InterleavedZeroBubble", 4, 3, 2),
    ("ZBVZeroBubble", 2, 1, 2), ("ZBVZeroBubble", 3, 6, 2), ("ZBVZeroBubble", 4, 8, 2),
]  # fmt: skip


def closed_form(schedule, ranks, microbatches, stages_per_rank) -> float:
    """Return the share of all ranks' time that is idle.

    GPipe and 1F1B: (P-1) / (M+P-1), whatever forward and backward cost. Interleaved1F1B, where M is a multiple of P:
    (P-1) / (vM+P-1). The zero-bubble schedules, where forward, input gradient and weight gradient cost the same:
    (P-1) / (3vM+P-1), which is only the time in which the first microbatch reaches the last rank; ZBV from M = 2P-1 on.
    """
    in_three = 3 if schedule.endswith("ZeroBubble") else 1
    return (ranks - 1) / (in_three * stages_per_rank * microbatches + ranks - 1)


def uneven(schedule, ranks, microbatches, stages_per_rank):
    """Simulate stages whose times are all different, with communication."""
    draw = random.Random(f"{schedule}{ranks}{microbatches}")
    stages = ranks * stages_per_rank
    forward, backward = ([draw.uniform(0.5, 3) for _ in range(stages)] for _ in range(2))
    weight = [draw.uniform(0.2, 0.8) for _ in range(stages)]
    communication = [draw.uniform(0, 0.5) for _ in range(stages - 1)]
    return simulate(schedule, forward, backward, microbatches, ranks, weight, communication), communication


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_an_operation_starts_when_its_rank_is_free_and_its_input_is_there_and_no_later(shape):
    result, communication = uneven(*shape)
    communication = [*communication, 0.0]
    owners, free = placement(shape[0], shape[1], shape[3]), [0.0] * shape[1]
    end = {
        (row["kind"].replace("I", "B"), row["stage"], row["microbatch"]): row["end"]
        for row in result.events
    }
    for row in result.events:
        stage, kind, microbatch = row["stage"], row["kind"].replace("I", "B"), row["microbatch"]
        assert row["rank"] == owners[stage]
        needed = [] if kind == "F" else [("F" if kind == "B" else "B", stage)]
        needed += [(kind, other) for other in {"F": [stage - 1], "B": [stage + 1]}.get(kind, [])]
        arrivals = [
            end[what, other, microbatch]
            + (owners[other] != owners[stage]) * communication[min(stage, other)]
            for what, other in needed
            if 0 <= other < len(owners)
        ]
        assert row["start"] == pytest.approx(max([free[row["rank"]], *arrivals]))
        free[row["rank"]] = row["end"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_equal_stages_idle_as_the_closed_form_says(schedule, ranks):
    usual = SCHEDULES[schedule].stages_per_rank
    for stages_per_rank in (usual, 3) if "Interleaved" in schedule else (usual,):
        for microbatches in (2 * ranks, 4 * ranks, 10 * ranks):
            stages = ranks * stages_per_rank
            result = simulate(schedule, [1.0] * stages, [2.0] * stages, microbatches, ranks, weight=0.5)
            expected = closed_form(schedule, ranks, microbatches, stages_per_rank)
            assert result.idle_share == pytest.approx(expected)


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
    with pytest.raises(UserError, match="1F1B does not run with 2 stages per rank; allowed: 1"):
        simulate("1F1B", [1] * 4, [1] * 4, 4, 2)
    with pytest.raises(UserError, match="0 microbatches; allowed: a whole number from 1"):
        simulate("GPipe", [1, 1], [1, 1], 0, 2)
    with pytest.raises(UserError, match="3 forward and 2 backward"):
        simulate("GPipe", [1, 1, 1], [1, 1], 2, 3)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 4), (4, 8)])
def test_the_order_of_a_schedule_gives_its_simulation(schedule, ranks, microbatches):
    orders = [[f"{kind}{m}" for kind, _, m in lane] for lane in order(schedule, ranks, microbatches)]
    simulation = simulate(schedule, [1] * ranks, [2] * ranks, microbatches, ranks)
    assert simulate_order(orders, forward=1, backward=2) == simulation.events


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        (
            [["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]],
            "stage 0 wants to do B0, and waits for B0 of stage 1",
        ),
        (
            [["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]],
            "stage 1 wants to do F1, and waits for F1 of stage 0",
        ),
        ([["B0", "F0"], ["F0", "B0"]], "waits for F0 of itself"),
        ([["F0", "F1", "B0", "B1"], ["F0", "B0"]], "stage 1 has F1 0 times"),
        ([["F0", "B0", "B0"]], "stage 0 has B0 2 times"),
        ([["F0", "W0"]], "stage 0 has 'W0'; allowed: F or B"),
        ([[], []], "there is no operation"),
    ],
)
def test_an_order_that_cannot_run_is_named(orders, said):
    with pytest.raises(UserError) as error:
        simulate_order(orders)
    assert said in str(error.value) and "\n" not in str(error.value)
