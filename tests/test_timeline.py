"""The pipeline rung on two processes, recorded: every operation is there, in order, on one clock."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from worlds import run_worlds

from mpdemo.errors import UserError
from mpdemo.measure import timeline
from mpdemo.measure.trial import Trial, observe
from mpdemo.notebook import plots
from mpdemo.predict import SCHEDULES, placement, simulate, usual_stages_per_rank
from mpdemo.predict.simulate import order
from mpdemo.rungs import data_parallel
from mpdemo.settings import Settings
from mpdemo.training.recorder import Recorder
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
    assert offsets[1] != 0 and abs(offsets[1]) < 0.5  # really one clock: only the barrier's imprecision is seen


def test_no_recording_is_refused(tmp_path):
    with pytest.raises(UserError, match="--timeline"):
        timeline.load(tmp_path)


def observed_trial(rung, **settings):
    """Build a rung on a batch of random images, in this process alone, and record it from outside."""
    world = World()
    trial = Trial(Settings(rung=rung, model="toy", image_size=28, batch_size=8, **settings), world)
    plain = {name: gradient.clone() for name, gradient in trial.gradients().items()}
    observe(trial, Recorder(0, world.device, alone=True))
    return trial, plain


def test_a_whole_model_is_recorded_from_outside_and_computes_the_same():
    trial, plain = observed_trial("single", microbatches=2)
    recorded = trial.gradients()  # outside of a step: not recorded
    assert trial.run.recorder.steps == [] and all((recorded[name] == plain[name]).all() for name in plain)
    for _ in range(2):
        trial.step()
    for step in trial.run.recorder.steps:
        events = step["events"]
        assert [f"{row['kind']}{row['microbatch']}" for row in events] == ["F0", "B0", "F1", "B1", "O0"]
        assert all(before["end"] <= after["start"] for before, after in pairwise(events))
        assert step["start"] <= events[0]["start"] and events[-1]["end"] <= step["end"]
        assert all(row["start"] < row["end"] for row in events)


def test_of_pytorchs_own_data_parallel_the_wrapper_is_recorded_and_not_each_copy(monkeypatch):
    """Its copies share the model's hooks, each in a thread and on another GPU, whose clocks cannot be compared."""
    trial = Trial(Settings(rung="data_parallel", model="toy", image_size=28, batch_size=8, devices=1), World())
    parallel = torch.nn.DataParallel(trial.rung.model)  # without GPUs it calls the model itself
    step = trial.rung.step
    trial.rung.step = lambda images, labels: (parallel(images), step(images, labels))[1]
    monkeypatch.setattr(trial.run, "device", SimpleNamespace(type="cuda"))
    observe(trial, recorder := Recorder(0, World().device, alone=True))
    assert not trial.rung.model._forward_pre_hooks and not trial.rung.model._forward_hooks
    monkeypatch.undo()
    trial.step()
    assert [row["kind"] for row in recorder.steps[0]["events"]] == ["F", "B", "O"]


def test_the_threads_of_data_parallel_have_a_lane_for_each_device_and_nothing_of_pytorch_stays_replaced():
    places = [(torch.Tensor, "backward"), (data_parallel, "forward"), (data_parallel, "gradients")]
    before = [getattr(*place) for place in places]
    trial, _ = observed_trial("data_parallel", devices=2)
    trial.step()
    assert [getattr(*place) for place in places] == before
    lanes = {0: [], 1: []}
    for row in timeline.merge(trial.run.recorder.steps):
        lanes[row["rank"]].append(row["kind"])
    assert lanes == {0: ["F", "B", "O"], 1: ["F", "B"]}


def test_a_predicted_step_ends_with_the_last_ranks_optimizer_step():
    step = simulate("GPipe", [1, 1], [2, 2], 1, 2).events  # rank 1 ends after 4, rank 0 after 6
    assert timeline.predict_seconds(step, "GPipe") == pytest.approx(6)
    for update, end in (({0: 0.5, 1: 1.0}, 6.5), ({0: 0.5, 1: 3.0}, 7.0)):
        updates = [{"rank": rank, "kind": "O", "start": 6, "end": 6 + seconds} for rank, seconds in update.items()]
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
    paper = simulate("GPipe", [1, 1], [2, 2], 4, 2)
    for unit in ("s", "forward passes"):
        axes = plots.timelines({"simulated": paper}, unit=unit).figure.axes[0]
        assert axes.get_xlabel() == f"time ({unit})" and "step 15" in axes.get_title(loc="left")
        assert sorted(text.get_text() for text in axes.texts) == sorted("0123" * 2 * 2)
