"""A real pipeline of two processes, recorded: every operation is there, in order, on one clock.

Run as a script, this file is one of those processes.
"""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from itertools import pairwise

import pytest

from mpdemo.errors import UserError
from mpdemo.paths import root
from mpdemo.plan import SCHEDULES, placement, simulate, usual_stages_per_rank
from mpdemo.plan.simulate import order
from mpdemo.timeline import read

RANKS, MICROBATCHES, STEPS = 2, 4, 3
RECORDED = list(SCHEDULES)


def one_rank(folder, rank):
    """Train a little pipeline with every schedule, recording; also compare clocks as two machines would."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import get_schedule_class

    from mpdemo.recorder import Recorder, clock_offset

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    for schedule in RECORDED:
        recorder, owners = Recorder(rank, torch.device("cpu")), placement(schedule, RANKS)
        stages = [
            pipelining.PipelineStage(torch.nn.Linear(256, 256), s, len(owners), torch.device("cpu"))
            for s in range(len(owners))
            if owners[s] == rank
        ]
        for stage in stages:
            if hasattr(stage, "_get_init_p2p_neighbors_ops"):  # PyTorch 2.11's handshake, which gloo does not need
                stage._get_init_p2p_neighbors_ops = list
            recorder.attach(stage)
        runner = get_schedule_class(schedule)(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=MICROBATCHES,
            loss_fn=torch.nn.functional.mse_loss,
        )
        batch = torch.ones(64 * MICROBATCHES, 256)
        for _ in range(STEPS):
            recorder.begin_step()
            runner.step(*((batch,) if owners[0] == rank else ()), target=batch, losses=[])
            recorder.end_step()
        runner.step(*((batch,) if owners[0] == rank else ()), target=batch, losses=[])  # outside: not recorded
        recorder.save(f"{folder}/{schedule}")
    offset = clock_offset(machine=f"machine {rank}")
    with open(f"{folder}/offset{rank}", "w") as file:
        file.write(repr(offset))
    dist.barrier()  # torch can abort when the group is destroyed right after the last collective
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timelines")
    command, environment = [sys.executable, __file__, str(folder)], {**os.environ, "PYTHONPATH": str(root())}
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * RANKS, errors
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


def test_what_is_computed_outside_a_step_is_not_recorded():
    import torch

    from mpdemo.recorder import Recorder

    class Stage:
        stage_index = 0

        def forward_one_chunk(self, chunk, seconds=0.0):
            time.sleep(seconds)
            return chunk

        def backward_one_chunk(self, chunk, full_backward=True):
            return chunk

        backward_weight_one_chunk = get_fwd_send_ops = get_bwd_send_ops = forward_one_chunk

    stage, recorder = Stage(), Recorder(0, torch.device("cpu"))
    recorder.attach(stage)
    assert stage.forward_one_chunk(7) == 7
    recorder.begin_step()
    stage.forward_one_chunk(3, seconds=0.02)
    stage.backward_one_chunk(3, full_backward=False)
    recorder.end_step()
    kinds = [(row["kind"], row["microbatch"]) for row in recorder.steps[0]["events"]]
    assert kinds == [("F", 3), ("I", 3)]
    first = recorder.steps[0]["events"][0]
    assert first["end"] - first["start"] >= 0.02


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


def test_the_picture_has_a_lane_a_rank_numbers_idle_shares_and_a_line_without_measured_numbers(recorded):
    from mpdemo.notebook import plots

    rows = read.load(recorded / "GPipe")[-1]
    ideal = simulate("GPipe", [1e-3] * RANKS, [2e-3] * RANKS, MICROBATCHES, RANKS)
    shown = plots.timeline(rows, ideal)
    assert repr(shown) == "timeline of 2 ranks, 4 microbatches: measured above ideal"
    assert shown.data["image/png"]
    measured, below = shown.figure.axes
    assert [label.get_text() for label in measured.get_yticklabels()] == ["rank 0", "rank 1"]
    assert f"idle {read.idle_share(rows):.0%}" in measured.get_title(loc="left")
    assert "step 15 ms, idle 20%" in below.get_title(loc="left")
    alone = plots.timeline(ideal=ideal).figure.axes[0]
    assert sorted(text.get_text() for text in alone.texts) == sorted("0123" * 2 * RANKS)


def test_the_time_axis_has_the_unit_that_is_given_and_a_picture_of_nothing_is_refused():
    from mpdemo.notebook import plots

    paper = simulate("GPipe", [1, 1], [2, 2], 4, 2)
    for given, drawn in (({}, "time (s)"), ({"unit": "forward passes"}, "time (forward passes)")):
        axes = plots.timeline(ideal=paper, **given).figure.axes[0]
        assert axes.get_xlabel() == drawn and "step 15" in axes.get_title(loc="left")
    with pytest.raises(UserError, match="no operations to draw"):
        plots.timeline([])


if __name__ == "__main__":
    one_rank(sys.argv[1], int(sys.argv[2]))
