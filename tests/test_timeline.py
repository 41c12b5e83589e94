"""The pipeline rung on two processes, recorded: every operation is there, in order, on one clock."""

import json
from itertools import pairwise

import pytest
import torch
from worlds import run_worlds

from mpdemo.errors import UserError
from mpdemo.measure import timeline
from mpdemo.measure.trial import RECORDED, Trial, record
from mpdemo.notebook import plots
from mpdemo.predict import SCHEDULES, simulate, usual_stages_per_rank
from mpdemo.predict.counting import peak_of_a_step
from mpdemo.predict.simulate import order
from mpdemo.settings import Settings
from mpdemo.settings.schedules import placement
from mpdemo.world.env import World

RANKS, MICROBATCHES, STEPS = 2, 4, 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timelines")
    run_worlds(folder, [[RANKS, "tests/programs/timelines.py", str(folder), str(MICROBATCHES), str(STEPS)]])
    return folder


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_operation_is_recorded_once_in_the_order_of_the_schedule_on_one_clock(recorded, schedule):
    """No two of a rank overlap, and nothing starts before the other rank has what it needs."""
    steps, last = timeline.load(recorded / schedule), len(placement(schedule, RANKS)) - 1
    listed = order(schedule, RANKS, MICROBATCHES, usual_stages_per_rank(schedule))
    assert len(steps) == STEPS
    for rows in steps:
        for rank in range(RANKS):
            lane = [row for row in rows if row["rank"] == rank]
            wanted = [tuple(operation) for operation in listed[rank]]
            assert [(row["kind"], row["stage"], row["microbatch"]) for row in lane] == wanted
            assert all(after["start"] >= before["end"] - 1e-9 for before, after in pairwise(lane))
            assert all(0 < row["on_core"] < row["end"] - row["start"] + 1e-3 for row in lane)
        assert min(row["start"] for row in rows) == 0
        done = {(row["kind"], row["stage"], row["microbatch"]): row for row in rows}
        for (kind, stage, microbatch), row in done.items():
            if kind == "F" and stage > 0:
                assert row["start"] >= done["F", stage - 1, microbatch]["end"]
            if kind in "BI" and stage < last:
                assert row["start"] >= done[kind, stage + 1, microbatch]["end"]


def test_the_prediction_from_measured_stage_times_has_the_recorded_shape(recorded):
    steps = timeline.load(recorded / "ZBVZeroBubble")
    predicted = timeline.predict(steps[1:], "ZBVZeroBubble")
    assert (predicted.ranks, predicted.microbatches, predicted.stages_per_rank) == (2, 4, 2)
    assert predicted.step_time <= max(timeline.step_time(step) for step in steps)
    weight = timeline.stage_times(steps[1:])["weight"]
    assert weight[0] > 0.8  # the library leaves the first stage's whole backward to the weight gradient


def test_a_simulated_step_is_read_like_a_recorded_one():
    result = simulate("1F1B", [0.1, 0.2], [0.2, 0.4], 4, 2)
    assert timeline.step_time(result.events) == pytest.approx(result.step_time)
    assert timeline.idle_share(result.events) == pytest.approx(result.idle_share)
    again = timeline.predict([result.events], "1F1B")
    assert again.step_time == pytest.approx(result.step_time)


def test_two_machines_find_the_difference_of_their_clocks(recorded):
    offsets = [float((recorded / f"offset{rank}").read_text()) for rank in range(RANKS)]
    assert offsets[0] == 0
    # really one clock: only the barrier's imprecision is seen
    assert offsets[1] != 0 and abs(offsets[1]) < 0.5


def test_no_recording_is_refused(tmp_path):
    with pytest.raises(UserError, match="--timeline"):
        timeline.load(tmp_path)


def test_a_step_of_pytorchs_profiler_tells_the_same_operations_and_the_messages_between_them(recorded):
    """Every schedule recorded what it does itself; the profiler saw the same, in the same process, in 1F1B."""
    step = json.loads((recorded / "profiled.json").read_text())
    listed = order("1F1B", RANKS, MICROBATCHES, 1)
    for rank in range(RANKS):
        lane = [row for row in step["events"] if row["rank"] == rank and row["lane"] == "compute"]
        marked = [(row["kind"], row["stage"], row["microbatch"]) for row in lane if "microbatch" in row]
        assert marked == [tuple(operation) for operation in listed[rank]] and lane[-1]["kind"] == "O"
    for direction, kind in (((0, 1), "F"), ((1, 0), "B")):
        sent = [row for row in step["events"] if (row["rank"], row.get("to")) == direction]
        computed = [row for row in step["events"] if (row["rank"], row["kind"]) == (direction[1], kind)]
        assert len(sent) == MICROBATCHES and all(row["bytes"] == 2 * 16 * 192 * 4 for row in sent)
        needed = [row for row in computed if "microbatch" in row]
        assert all(message["moves"] <= row["start"] for message, row in zip(sent, needed, strict=True))


def profiled_trial(rung, **settings):
    """Build a rung on a batch of random images in this process alone; return two gradients and its recorded steps."""
    trial = Trial(
        Settings(rung=rung, model="transformer", image_size=28, batch_size=8, **settings), World()
    )
    before = {name: gradient.clone() for name, gradient in trial.gradients().items()}
    after = trial.gradients()
    trial.step()  # makes the optimizer's states
    return trial, all(torch.equal(before[name], after[name]) for name in before), record(trial)


def test_a_whole_model_is_recorded_from_outside_and_computes_the_same():
    trial, equal, steps = profiled_trial("single", optimizer="sgd", microbatches=2)
    (counted,) = peak_of_a_step(trial)  # by a dispatch mode instead
    assert equal and len(steps) == RECORDED - 2
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in trial.rung.model.modules()
    )
    for step in steps:
        rows = [(row["kind"], row["layer"]) for row in step["events"] if "layer" in row]
        part = [("F", layer) for layer in range(8)] + [("B", layer) for layer in reversed(range(8))]
        assert rows == 2 * part and step["events"][-1]["kind"] == "O"
        assert all(before["end"] <= after["start"] for before, after in pairwise(step["events"]))
        weights = sum(p.nbytes for p in trial.rung.model.parameters())
        time, *parts = step["memory"][0][0]
        assert parts[:3] == pytest.approx(3 * [weights], rel=2e-3)  # SGD keeps one number of each
        assert max(sum(row[1:]) for row in step["memory"][0]) == pytest.approx(sum(counted), rel=0.02)


def test_the_threads_of_data_parallel_have_a_lane_for_each_device():
    _, equal, steps = profiled_trial("data_parallel", devices=2)
    lanes = {rank: {row["kind"] for row in steps[0]["events"] if row["rank"] == rank} for rank in (0, 1)}
    assert equal and lanes == {0: {"F", "B", "O"}, 1: {"F", "B"}}


def test_a_predicted_step_ends_with_the_last_ranks_optimizer_step():
    step = simulate("GPipe", [1, 1], [2, 2], 1, 2).events  # rank 1 ends after 4, rank 0 after 6
    assert timeline.predict_seconds(step, "GPipe") == pytest.approx(6)
    for update, end in (({0: 0.5, 1: 1.0}, 6.5), ({0: 0.5, 1: 3.0}, 7.0)):
        updates = [
            {"rank": rank, "kind": "O", "start": 6, "end": 6 + seconds} for rank, seconds in update.items()
        ]
        assert timeline.predict_seconds(step + updates, "GPipe") == pytest.approx(end)


def test_ranks_that_share_cores_take_turns_in_the_prediction():
    step = simulate("GPipe", [1, 1], [2, 2], 1, 2).events
    for row in step:
        row["on_core"] = row["end"] - row["start"]
        row["start"], row["end"] = 2 * row["start"], 2 * row["end"]
    assert timeline.predict_seconds(step, "GPipe") == pytest.approx(12)  # half of it waits for a core
    assert timeline.predict_seconds(step, "GPipe", cores=1) == pytest.approx(6)
    replicas = [row | {"rank": row["rank"] + r} for row in step for r in (0, 2)]
    assert timeline.predict_seconds(replicas, "GPipe", cores=2) == pytest.approx(6)
    assert timeline.predict_seconds(replicas, "GPipe", cores=1) == pytest.approx(12)


def test_the_picture_has_a_lane_a_rank_numbers_and_idle_shares_and_the_unit_that_is_given(recorded):
    rows = timeline.load(recorded / "GPipe")[-1]
    ideal = simulate("GPipe", [1e-3] * RANKS, [2e-3] * RANKS, MICROBATCHES, RANKS)
    shown = plots.timelines({"measured": rows, "ideal": ideal}, unit="s")
    assert repr(shown) == "timelines of measured, ideal" and shown.data["image/png"]
    measured, below = shown.figure.axes
    assert [label.get_text() for label in measured.get_yticklabels()] == ["rank 0", "rank 1"]
    assert f"idle {timeline.idle_share(rows):.0%}" in measured.get_title(loc="left")
    assert "step 15 ms, idle 20%" in below.get_title(loc="left")
    titles = [axes.get_title(loc="left") for axes in shown.figure.axes]
    assert shown.metadata["image/png"]["alt"] == "; ".join(titles)
    paper = simulate("GPipe", [1, 1], [2, 2], 4, 2)
    for unit in ("s", "forward passes"):
        axes = plots.timelines({"simulated": paper}, unit=unit).figure.axes[0]
        assert axes.get_xlabel() == f"time ({unit})" and "step 15" in axes.get_title(loc="left")
        assert sorted(text.get_text() for text in axes.texts) == sorted("0123" * 2 * 2)
