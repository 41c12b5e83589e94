"""The pipeline rung on two processes, recorded: every operation is there, in order, on one clock."""

import json
from itertools import pairwise

import pytest
from worlds import run_worlds

from mpdemo.errors import UserError
from mpdemo.plan import SCHEDULES, placement, simulate, usual_stages_per_rank
from mpdemo.plan.simulate import order
from mpdemo.timeline import read

RANKS, MICROBATCHES, STEPS = 2, 4, 3
RECORDED = list(SCHEDULES)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timelines")
    run_worlds(folder, [[RANKS, "tests/programs/timelines.py", str(folder), str(MICROBATCHES), str(STEPS)]])
    return folder


@pytest.mark.parametrize("schedule", RECORDED)
def test_every_operation_is_recorded_once_in_the_order_of_the_schedule_and_none_overlaps(recorded, schedule):
    steps, listed = (
        read.load(recorded / schedule),
        order(schedule, RANKS, MICROBATCHES, usual_stages_per_rank(schedule)),
    )
    assert len(steps) == STEPS
    for rows in steps:
        for rank in range(RANKS):
            lane = [row for row in rows if row["rank"] == rank and row["kind"] != "send"]
            computing = [row for row in lane if row["kind"] in read.COMPUTES]
            assert [(row["kind"], row["stage"], row["microbatch"]) for row in computing] == list(
                map(tuple, listed[rank])
            )
            assert all(after["start"] >= before["end"] - 1e-9 for before, after in pairwise(lane))  # waits, too
            assert 0 < sum(row["end"] - row["start"] for row in computing) < read.step_time(rows)
            assert all(0 < row["on_core"] < row["end"] - row["start"] + 1e-3 for row in computing)
        assert min(row["start"] for row in rows if row["kind"] in read.COMPUTES) == 0


@pytest.mark.parametrize("schedule", RECORDED)
def test_the_clocks_agree_nothing_starts_before_the_other_rank_has_sent_it(recorded, schedule):
    owners = placement(schedule, RANKS)
    for rows in read.load(recorded / schedule):
        done = {(row["kind"], row["stage"], row["microbatch"]): row for row in rows}
        for (kind, stage, microbatch), row in done.items():
            if kind == "F" and stage > 0:
                assert row["start"] >= done["F", stage - 1, microbatch]["end"]
            if kind in "BI" and stage < len(owners) - 1:
                assert row["start"] >= done[kind, stage + 1, microbatch]["end"]
        borders = sum(a != b for a, b in pairwise(owners))
        assert sum(row["kind"] == "send" for row in rows) == 2 * borders * MICROBATCHES


def test_the_prediction_from_measured_stage_times_has_the_recorded_shape(recorded):
    steps = read.load(recorded / "ZBVZeroBubble")
    predicted = read.predict(steps[1:], "ZBVZeroBubble")
    assert (predicted.ranks, predicted.microbatches, predicted.stages_per_rank) == (2, 4, 2)
    assert predicted.step_time <= max(read.step_time(step) for step in steps)
    weight = read.stage_times(steps[1:])["weight"]
    assert weight[0] > 0.8  # the library leaves the first stage's whole backward to the weight gradient


def test_a_simulated_step_is_read_like_a_recorded_one():
    result = simulate("1F1B", [0.1, 0.2], [0.2, 0.4], 4, 2)
    assert read.step_time(result.events) == pytest.approx(result.step_time)
    assert read.idle_share(result.events) == pytest.approx(result.idle_share)
    again = read.predict([result.events], "1F1B")
    assert again.step_time == pytest.approx(result.step_time)


def test_two_machines_find_the_difference_of_their_clocks(recorded):
    offsets = [float((recorded / f"offset{rank}").read_text()) for rank in range(RANKS)]
    assert offsets[0] == 0
    assert offsets[1] != 0 and abs(offsets[1]) < 0.5  # really one clock: only the barrier's imprecision is seen


def test_no_recording_and_half_a_recording_are_refused(recorded, tmp_path):
    with pytest.raises(UserError, match="--timeline"):
        read.load(tmp_path)
    whole = json.loads((recorded / "GPipe" / "timeline-rank0.json").read_text())
    (tmp_path / "timeline-rank0.json").write_text(json.dumps(whole))
    whole["rank"], whole["steps"] = 1, whole["steps"][:-1]
    (tmp_path / "timeline-rank1.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match="different numbers of steps"):
        read.load(tmp_path)


def observed_trial(rung, **settings):
    """Build a rung on a batch of random images, in this process alone, and record it from outside."""
    from mpdemo.recorder import Recorder
    from mpdemo.settings import Settings
    from mpdemo.timeline.observe import observe
    from mpdemo.trial import Trial
    from mpdemo.world.env import World

    world = World()
    trial = Trial(Settings(rung=rung, model="toy", image_size=28, batch_size=8, **settings), world)
    plain = {name: gradient.clone() for name, gradient in trial.gradients().items()}
    observe(trial, Recorder(0, world.device, alone=True))
    return trial, plain


def test_a_whole_model_is_recorded_from_outside_and_computes_the_same():
    import torch

    trial, plain = observed_trial("single", microbatches=2)
    recorded = trial.gradients()  # outside of a step: not recorded
    assert trial.recorder.steps == []
    assert all(torch.equal(recorded[name], plain[name]) for name in plain)
    for _ in range(2):
        trial.step()
    for step in trial.recorder.steps:
        events = step["events"]
        assert [f"{row['kind']}{row['microbatch']}" for row in events if row["kind"] != "O"] == ["F0", "B0", "F1", "B1"]
        assert events[-1]["kind"] == "O"
        assert all(before["end"] == after["start"] for before, after in pairwise(events[:4]))
        assert step["start"] <= events[0]["start"] and events[-1]["end"] <= step["end"]
        assert all(row["start"] < row["end"] for row in events)


def test_the_threads_of_data_parallel_are_recorded_one_lane_for_each_device():
    trial, _ = observed_trial("data_parallel", devices=2)
    trial.step()
    lanes = {0: [], 1: []}
    for row in read.merge(trial.recorder.steps):
        lanes[row["rank"]].append(row["kind"])
    assert lanes == {0: ["F", "B", "O"], 1: ["F", "B"]}


def test_a_predicted_step_ends_with_the_last_ranks_optimizer_step():
    step = simulate("GPipe", [1, 1], [2, 2], 1, 2).events  # rank 1 ends after 4, rank 0 after 6
    assert read.predict_seconds(step, "GPipe") == pytest.approx(6)
    for update, end in (({0: 0.5, 1: 1.0}, 6.5), ({0: 0.5, 1: 3.0}, 7.0)):
        updates = [
            {"rank": rank, "stage": 0, "kind": "O", "microbatch": 0, "start": 6.0, "end": 6.0 + seconds}
            for rank, seconds in update.items()
        ]
        assert read.predict_seconds(step + updates, "GPipe") == pytest.approx(end)


def test_ranks_that_share_cores_take_turns_in_the_prediction():
    step = simulate("GPipe", [1, 1], [2, 2], 1, 2).events
    for row in step:
        row["on_core"] = row["end"] - row["start"]
        row["start"], row["end"] = 2 * row["start"], 2 * row["end"]
    assert read.predict_seconds(step, "GPipe") == pytest.approx(12)  # half of it waits for a core
    assert read.predict_seconds(step, "GPipe", cores=1) == pytest.approx(6)
    replicas = [row | {"rank": row["rank"] + r} for row in step for r in (0, 2)]
    assert read.predict_seconds(replicas, "GPipe", cores=2) == pytest.approx(6)
    assert read.predict_seconds(replicas, "GPipe", cores=1) == pytest.approx(12)


def test_the_picture_has_a_lane_a_rank_numbers_and_idle_shares_and_the_unit_that_is_given(recorded):
    from mpdemo.notebook import plots

    rows = read.load(recorded / "GPipe")[-1]
    ideal = simulate("GPipe", [1e-3] * RANKS, [2e-3] * RANKS, MICROBATCHES, RANKS)
    shown = plots.timelines({"measured": rows, "ideal": ideal}, memory=False, unit="s")
    assert repr(shown) == "timelines of measured, ideal" and shown.data["image/png"]
    measured, below = shown.figure.axes
    assert [label.get_text() for label in measured.get_yticklabels()] == ["rank 0", "rank 1"]
    assert f"idle {read.idle_share(rows):.0%}" in measured.get_title(loc="left")
    assert "step 15 ms, idle 20%" in below.get_title(loc="left")
    paper = simulate("GPipe", [1, 1], [2, 2], 4, 2)
    for unit in ("s", "forward passes"):
        axes = plots.timelines({"simulated": paper}, memory=False, unit=unit).figure.axes[0]
        assert axes.get_xlabel() == f"time ({unit})" and "step 15" in axes.get_title(loc="left")
        assert sorted(text.get_text() for text in axes.texts) == sorted("0123" * 2 * 2)
