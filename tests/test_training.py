"""The loop: what it writes, which learning rate each step has, and that it doesn't wait in every step."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import TRAIN, run_worlds, written

from mpdemo import models
from mpdemo.errors import RunFailed, UserError
from mpdemo.measure import timeline
from mpdemo.run import Rung, train, validate
from mpdemo.settings import Settings, checked
from mpdemo.training.log import RunLog
from mpdemo.world.env import World

ROUNDING = 2e-5  # float32, summed in another order
TOY = {"model": "toy", "batch_size": 512}


@pytest.fixture
def runs(tmp_path):
    """Train in this process, one core, in folders of `tmp_path`: run("name", **settings) -> its folder."""
    return lambda name, **settings: run_here(tmp_path / name, **settings)


def run_here(out, **settings):
    torch.set_num_threads(1)
    settings = {"rung": "single", "out": str(out)} | settings
    train(checked(Settings(**settings)), World())
    return out


def lines(out, event):
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def losses(out):
    """Loss by step; each step stands there once."""
    rows = lines(out, "step")
    by_step = {row["step"]: row["loss"] for row in rows}
    assert len(by_step) == len(rows)
    return by_step


def summary(out):
    return json.loads((Path(out) / "summary.json").read_text())


def test_what_a_run_writes(runs):
    out = runs("run", **TOY, epochs=2, log_every=2)
    start, *rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (start["event"], start["step"], start["steps"]) == ("start", 0, 6)
    assert [(r["event"], r["step"], r["epoch"]) for r in rows] == [
        ("step", 1, 0), ("step", 2, 0), ("step", 3, 0), ("epoch", 3, 0),
        ("step", 4, 1), ("step", 5, 1), ("step", 6, 1), ("epoch", 6, 1),
    ]  # fmt: skip
    written = {"event", "step", "epoch", "loss", "images_per_second"}
    assert [set(row) - written for row in rows[:3]] == [{"peak_memory_mib"}] * 3 and written <= set(rows[0])
    assert 50 < rows[1]["peak_memory_mib"][0] <= summary(out)["peak_memory_mib"][0] < 20_000
    assert set(rows[3]) == {"event", "step", "epoch", "train_loss", "train_accuracy", "validation_loss",
                            "validation_accuracy"}  # fmt: skip
    assert all(row["images_per_second"] > 0 for row in rows[:3])
    assert rows[3]["train_loss"] == pytest.approx(sum(r["loss"] for r in rows[:3]) / 3)
    assert 0 <= rows[7]["validation_accuracy"] <= 1 and (rows[7]["validation_accuracy"] * 261) % 1 < 1e-6
    written = summary(out)
    assert written["settings"]["batch_size"] == 512 and written["settings"]["rung"] == "single"
    assert (
        written["environment"]["torch"] == torch.__version__
        and written["environment"]["device"] == "cpu core"
    )
    assert (
        len(written["environment"]["hosts"])
        == len(written["peak_memory_mib"])
        == written["world_size"]
        == 1
    )
    assert (written["steps"], written["validation_loss"]) == (6, rows[7]["validation_loss"])


def test_the_speed_of_a_step_leaves_the_validation_out(tmp_path, monkeypatch):
    clock, validated = time.perf_counter, []
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1e6 * len(validated))
    settings = checked(Settings(rung="single", **TOY, epochs=3, log_every=1, out=str(tmp_path)))
    train(settings, World(), validate=lambda *_: validated.append(0) or (0.0, 0.0))
    assert all(row["images_per_second"] > 1 for row in lines(tmp_path, "step")) and len(validated) == 3


def test_a_new_run_keeps_the_last_ones_metrics(runs):
    out = runs("run", **TOY, steps=2)
    (out / "timeline-rank3.json").write_text("of a larger world")
    out = runs("run", **TOY, steps=1)
    assert list(losses(out)) == [1]
    assert (out / "metrics.previous.jsonl").read_text().count('"event": "step"') == 2
    assert not (out / "timeline-rank3.json").exists()


def test_a_diverged_training_ends(runs):
    with pytest.raises(
        RunFailed, match=r"^the loss is (nan|inf) at step \d+: the training diverged; lower --lr 1000"
    ):
        runs("run", **TOY, optimizer="sgd", lr=1000, warmup_steps=0, steps=20, log_every=1)


def test_two_runs_do_not_share_a_folder(runs, tmp_path):
    first = RunLog(tmp_path / "run", active=True)
    with pytest.raises(UserError, match="another run writes to --out"):
        runs("run", **TOY, steps=1)
    first.finish({})
    runs("run", **TOY, steps=1)


def test_the_end_of_a_run_that_finds_no_room_is_one_line(tmp_path):
    log = RunLog(tmp_path / "run", active=True)
    (tmp_path / "run" / "summary.json").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match="the end of the run could not be written to .*run: No space left"):
        log.finish({})


def rates(runs, **settings):
    """The learning rate of every step that a run did."""
    seen = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"])
    )
    try:
        runs("rates", **settings)
    finally:
        hook.remove()
    return seen


def test_learning_rate_of_every_step(runs):
    """Linear to --lr, then half a cosine to 0 at the end of the epochs, also where --steps ends the run earlier."""
    common = TOY | {"epochs": 4, "lr": 0.01, "warmup_steps": 4}  # 3 steps per epoch
    wanted = [0.0025, 0.005, 0.0075, 0.01, *(0.005 * (1 + math.cos(math.pi * i / 8)) for i in range(8))]
    assert rates(runs, **common) == pytest.approx(wanted)
    assert rates(runs, **common, steps=7) == pytest.approx(wanted[:7])
    assert rates(runs, **common | {"epochs": None}, steps=12) == pytest.approx(wanted)
    # half of so few warm up
    assert rates(runs, **TOY, steps=4) == pytest.approx([0.0005, 0.001, 0.001, 0.0005])
    assert rates(runs, **TOY, steps=24)[8:12] == pytest.approx([0.0009, 0.001, 0.001, 0.000987], rel=1e-3)


JPEG = {
    "dataset": "folder",
    "image_size": 32,
    "batch_size": 8,
    "model": "convnet",
    "epochs": 2,
    "log_every": 3,
}


def test_a_world_on_augmented_jpeg_files_trains_like_one_device_and_validates_what_it_trained(
    tmp_path, runs, jpegs
):
    """Ten steps in two epochs, group norm: in each step the same images, cropped alike. A pipeline reads them once."""
    common = JPEG | {"data": str(jpegs), "norm": "group"}
    piped = {"rung": "pipeline", "schedule": "1F1B", "microbatches": 4, "cut": "layer1"}
    todo = [common | rung | {"out": str(tmp_path / rung["rung"])} for rung in ({"rung": "ddp"}, piped)]
    run_worlds(tmp_path, [[2, TRAIN, written(tmp_path / "runs.json", todo)]])
    alone = runs("alone", **common)
    for rung in ("ddp", "pipeline"):
        assert losses(tmp_path / rung) == pytest.approx(losses(alone), rel=ROUNDING)
        for one, other in zip(lines(tmp_path / rung, "epoch"), lines(alone, "epoch"), strict=True):
            assert list(one.values())[1:] == pytest.approx(list(other.values())[1:], rel=ROUNDING)


def test_replicas_of_batch_norm_validate_with_the_first_ones_averages(monkeypatch):
    """Each has its own; without this they would validate as different models."""
    sent, model = [], models.build("convnet")
    monkeypatch.setattr("mpdemo.run.dist.broadcast", lambda buffer, **where: sent.append((buffer, where)))
    for replicas in (1, 2):
        assert sent == []
        validate(
            Rung(model, None, None, replicas=replicas, group="group"),
            [(torch.randn(2, 1, 28, 28), torch.zeros(2).long())],
            torch.device("cpu"),
        )
    assert [id(buffer) for buffer, _ in sent] == [id(buffer) for buffer in model.buffers()]
    assert all(where == {"group": "group", "group_src": 0} for _, where in sent)


def test_the_timeline_of_a_hybrid_has_two_pipelines_and_an_all_reduce_at_their_end(tmp_path):
    settings = {
        "rung": "hybrid",
        "schedule": "ZBVZeroBubble",
        "image_size": 14,
        "batch_size": 8,
        "steps": 1,
    }
    settings |= {"timeline": True, "out": str(tmp_path)}
    run_worlds(tmp_path, [[4, TRAIN, written(tmp_path / "runs.json", [settings])]])
    (rows,) = timeline.load(tmp_path)
    work = {
        rank: [r for r in rows if r["rank"] == rank and r["kind"] in timeline.WORKS] for rank in range(4)
    }
    assert {rank: {row["stage"] for row in lane} for rank, lane in work.items()} == {
        0: {0, 3}, 1: {1, 2}, 2: {0, 3}, 3: {1, 2}}  # fmt: skip
    assert all([row["kind"] for row in lane].index("A") == len(lane) - 1 for lane in work.values())
    assert timeline.step_time(rows) == max(lane[-1]["end"] for lane in work.values())


class CountWaits(TorchDispatchMode):
    """Count what makes the host wait for the device: numbers fetched from tensors."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        tolist = torch.Tensor.tolist

        def counting(tensor):
            self.count += 1
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", counting)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        fetching = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")
        self.count += any(name in str(function) for name in fetching)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("rung", ["single", "data_parallel", "model_parallel", "pipeline"])
def test_the_loop_does_not_wait_every_step(runs, monkeypatch, rung):
    """Forty steps more, the same number of waits."""
    counts, common = [], {"model": "toy", "optimizer": "sgd", "batch_size": 24, "log_every": 1000}
    for steps in (10, 50):
        form = "one-process" if rung in ("model_parallel", "pipeline") else None
        with CountWaits(monkeypatch) as waits:
            runs(f"run{steps}", rung=rung, form=form, **common, steps=steps)
        counts.append(waits.count)
        monkeypatch.undo()
    assert counts[0] == counts[1] > 0
