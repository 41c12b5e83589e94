"""The loop: what it writes, and that a training stopped anywhere goes on as if nothing had happened, in any rung."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from jpegs import make_jpeg_folder
from soak import same
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import TRAIN, run_worlds, written

from mpdemo.errors import RunFailed, UserError
from mpdemo.parallel.rung import Rung
from mpdemo.paths import root
from mpdemo.settings import Settings, checked
from mpdemo.training import checkpoint
from mpdemo.training.loop import train
from mpdemo.training.resume import read_newest
from mpdemo.log import RunLog
from mpdemo.world.env import World

ROUNDING = 2e-5  # float32, summed in another order


@pytest.fixture(scope="session")
def jpegs(tmp_path_factory):
    """40 training and 10 validation images: 5 steps per epoch in batches of 8."""
    path = tmp_path_factory.mktemp("jpegs")
    make_jpeg_folder(path, images=4, size=72)
    return path


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Train in this process, one core, in folders of `tmp_path`: run("name", **settings) -> its folder."""
    return lambda name, **settings: run_here(tmp_path / name, **settings)


def run_here(out, **settings):
    torch.set_num_threads(1)
    settings = {"rung": "single", "out": str(out)} | settings
    assert train(checked(Settings(**settings)), World()) == 0
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


def epochs(out):
    """The epochs' results, without the times."""
    return [{k: v for k, v in row.items() if k not in ("images_per_second", "time")} for row in lines(out, "epoch")]


def summary(out):
    return json.loads((Path(out) / "summary.json").read_text())


def far(losses_by_step, wanted):
    """The largest relative difference of two rows of losses by step."""
    assert losses_by_step.keys() == wanted.keys()
    return max(abs(losses_by_step[step] - wanted[step]) / abs(wanted[step]) for step in wanted)


def after(losses_by_step, step):
    return {k: v for k, v in losses_by_step.items() if k > step}


def test_what_a_run_writes(runs):
    out = runs("run", model="toy", batch_size=512, epochs=2, log_every=2)
    start, *rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (start["event"], start["step"], start["steps"]) == ("start", 0, 6)
    assert [(r["event"], r["step"], r["epoch"]) for r in rows] == [
        ("step", 1, 0), ("step", 2, 0), ("step", 3, 0), ("epoch", 3, 0),
        ("step", 4, 1), ("step", 5, 1), ("step", 6, 1), ("epoch", 6, 1),
    ]  # fmt: skip
    written = {"event", "step", "epoch", "loss", "images_per_second", "time"}
    assert [set(row) - written for row in rows[:2]] == [{"peak_memory_mib"}] * 2 and written <= set(rows[0])
    assert 50 < rows[1]["peak_memory_mib"][0] <= summary(out)["peak_memory_mib"][0]
    assert set(rows[3]) == {"event", "step", "epoch", "train_loss", "train_accuracy", "validation_loss",
                            "validation_accuracy", "images_per_second", "time"}  # fmt: skip
    times = [row["time"] for row in rows]
    assert times == sorted(times) and abs(times[-1] - time.time()) < 60
    assert all(row["images_per_second"] > 0 for row in rows)
    assert rows[3]["train_loss"] == pytest.approx(sum(r["loss"] for r in rows[:3]) / 3)
    assert 0 <= rows[7]["validation_accuracy"] <= 1 and (rows[7]["validation_accuracy"] * 261) % 1 < 1e-6
    written = summary(out)
    assert written["settings"]["batch_size"] == 512 and written["settings"]["rung"] == "single"
    assert written["environment"]["torch"] == torch.__version__ and written["environment"]["device"] == "cpu core"
    assert len(written["environment"]["hosts"]) == len(written["peak_memory_mib"]) == written["world_size"] == 1
    assert 50 < written["peak_memory_mib"][0] < 20_000
    assert (written["steps"], written["epochs"], written["images"], written["stopped"]) == (6, 2, 3072, False)
    assert (written["loss"], written["validation_loss"]) == (rows[6]["loss"], rows[7]["validation_loss"])
    assert written["parameters"] == 28 * 28 * 32 + 32 + 2 * (32 * 32 + 32) + 32 * 10 + 10


def test_it_learns(runs):
    out = runs("run", model="convnet", batch_size=64, epochs=2, lr=0.02)
    assert epochs(out)[-1]["validation_accuracy"] > 0.9
    assert epochs(out)[1]["train_loss"] < epochs(out)[0]["train_loss"] / 2


def test_same_seed_same_losses(runs, jpegs):
    jpeg = {"model": "convnet", "dataset": "folder", "data": str(jpegs), "image_size": 32, "batch_size": 8}
    one, two, other = (runs(f"run{i}", **jpeg, seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert losses(one) == losses(two) and epochs(one) == epochs(two)
    assert losses(one) != losses(other)


def test_steps_end_a_run_within_an_epoch(runs):
    out = runs("run", model="toy", batch_size=512, steps=4)
    assert list(losses(out)) == [1, 2, 3, 4]
    assert [row["step"] for row in epochs(out)] == [3, 4]


def test_a_warning_during_a_validation_is_obeyed(runs, tmp_path, monkeypatch):
    """It may take longer than what is left. The resumed run does the whole validation."""
    common = {"model": "toy", "batch_size": 512, "epochs": 2, "log_every": 1}  # 3 steps per epoch
    whole, evaluate = runs("whole", **common), Rung.evaluate

    def warned(self, images, labels):
        os.kill(os.getpid(), signal.SIGUSR1)
        return evaluate(self, images, labels)

    with monkeypatch.context() as patch:
        patch.setattr(Rung, "evaluate", warned)
        settings = Settings(rung="single", out=str(tmp_path / "part"), **common)
        assert train(checked(settings), World()) == 3
    part = tmp_path / "part"
    assert list(losses(part)) == [1, 2, 3] and epochs(part) == []
    runs("part", **common, resume="auto")
    assert losses(part) == losses(whole) and epochs(part) == epochs(whole)


def test_a_new_run_keeps_the_last_ones_metrics(runs):
    out = runs("run", model="toy", batch_size=512, steps=2)
    (out / "timeline-rank3.json").write_text("of a larger world")
    out = runs("run", model="toy", batch_size=512, steps=1)
    assert list(losses(out)) == [1]
    assert (out / "metrics.previous.jsonl").read_text().count('"event": "step"') == 2
    assert not (out / "timeline-rank3.json").exists()


# resuming


@pytest.fixture(scope="module")
def jpeg(jpegs):
    """Settings of ten steps in two epochs, on images that are decoded and augmented."""
    return {"dataset": "folder", "data": str(jpegs), "image_size": 32, "batch_size": 8, "log_every": 3}


@pytest.mark.parametrize("stop", [3, 5, 7, 10], ids=["mid-epoch", "end of epoch", "second epoch", "end"])
def test_resumed_equals_uninterrupted(runs, jpeg, stop):
    """Exactly, into the run's own folder: losses, epochs' averages, final weights; nothing stands there twice."""
    common = {"model": "convnet", "epochs": 2, **jpeg}
    whole = runs("whole", **common, checkpoint_every=10)
    part = runs("part", **common | {"epochs": None}, steps=stop, checkpoint_every=stop)
    assert list(losses(part)) == list(range(1, stop + 1))
    runs("part", **common, resume=str(part), checkpoint_every=10)
    assert losses(part) == losses(whole)
    assert epochs(part) == epochs(whole)
    assert summary(part)["validation_loss"] == summary(whole)["validation_loss"]
    assert summary(part)["loss"] == summary(whole)["loss"]
    ends = [checkpoint.read(checkpoint.newest(out)) for out in (part, whole)]
    assert all(torch.equal(ends[0]["model"][name], ends[1]["model"][name]) for name in ends[1]["model"])


def test_resume_goes_back_to_the_checkpoint(runs, jpeg):
    """A run that died two steps after its checkpoint: those two are done again, and stand there once."""
    out = runs("run", model="toy", steps=8, checkpoint_every=6, **jpeg)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')  # it died while it wrote
    whole = runs("whole", model="toy", epochs=2, **jpeg)
    runs("run", model="toy", epochs=2, resume=str(out), **jpeg)
    assert losses(out) == losses(whole) and epochs(out) == epochs(whole)


def test_resume_into_another_folder(runs, jpeg):
    old = runs("old", model="toy", steps=6, checkpoint_every=6, **jpeg)
    before = (old / "metrics.jsonl").read_text()
    new = runs("new", model="toy", steps=8, resume=str(old), **jpeg)
    assert list(losses(new)) == [7, 8]
    assert (old / "metrics.jsonl").read_text() == before


def test_a_run_that_goes_on_from_another_folder_keeps_the_checkpoints_that_are_in_its_own(runs):
    """But a job that Slurm puts back into the queue finds its own checkpoints, and may begin again."""
    settings = {"model": "toy", "batch_size": 512, "checkpoint_every": 1}
    old, other = runs("old", **settings, steps=1), runs("other", **settings, steps=2)
    files = sorted((other / "checkpoints").iterdir())
    with pytest.raises(UserError, match="other holds the checkpoints of a run"):
        runs("other", **settings, steps=3, resume=str(old))
    assert sorted((other / "checkpoints").iterdir()) == files
    new = runs("new", **settings, steps=2, resume=str(old))
    assert list(losses(runs("new", **settings, steps=3, resume=str(old)))) == [2, 3]
    assert list(losses(runs("new", **settings, steps=4, resume=str(new)))) == [2, 3, 4]
    assert list(losses(runs("new", **settings, steps=2, resume=str(old)))) == [2]


STORY = {"optimizer": "adamw", "lr": 0.01, "warmup_steps": 4, "lr_schedule": "cosine"}


def rates(runs, **settings):
    """The learning rate of every step that a run did."""
    seen = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    try:
        runs("rates", **settings)
    finally:
        hook.remove()
    return seen


def test_learning_rate_of_every_step(runs):
    """Linear to --lr, then half a cosine to 0 at the end of the epochs, also where --steps ends the run earlier."""
    common = {"model": "toy", "batch_size": 512, "epochs": 4} | STORY  # 3 steps per epoch
    wanted = [0.0025, 0.005, 0.0075, 0.01, *(0.005 * (1 + math.cos(math.pi * i / 8)) for i in range(8))]
    assert rates(runs, **common) == pytest.approx(wanted)
    assert rates(runs, **common, steps=7) == pytest.approx(wanted[:7])
    assert rates(runs, **common | {"epochs": None}, steps=12) == pytest.approx(wanted)
    assert rates(runs, **common | {"lr_schedule": "constant"}) == pytest.approx([*wanted[:3], *[0.01] * 9])


def test_learning_rate_by_optimizer(runs):
    assert rates(runs, model="toy", batch_size=512) == [0.01] * 3
    assert rates(runs, model="toy", batch_size=512, optimizer="adamw") == [0.001] * 3


@pytest.mark.parametrize("stop", range(1, 11))
def test_adamw_warm_up_and_cosine_are_resumed(runs, jpeg, stop):
    """After any step: the very same losses and weights as without a stop."""
    common = {"model": "toy", "epochs": 2, "checkpoint_every": 10} | STORY | jpeg
    whole = runs("whole", **common)
    part = runs("part", **common | {"checkpoint_every": stop}, steps=stop)
    assert list(losses(part)) == list(range(1, stop + 1))
    runs("part", **common, resume=str(part))
    assert losses(part) == losses(whole) and epochs(part) == epochs(whole)
    ends = [checkpoint.read(checkpoint.newest(out)) for out in (part, whole)]
    assert all(torch.equal(ends[0]["model"][name], ends[1]["model"][name]) for name in ends[1]["model"])
    for name, state in ends[1]["optimizer"].items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(ends[0]["optimizer"][name][key], value) for key, value in state.items())


def test_a_cosine_of_another_length_is_refused(runs):
    """Of a constant learning rate the length does not matter."""
    common = {"model": "toy", "batch_size": 512}
    out = runs("run", **common | STORY, steps=5, checkpoint_every=5)
    with pytest.raises(UserError, match="the checkpoint's cosine ends after 5 steps, not 12; give") as refusal:
        runs("run", **common | STORY, epochs=4, resume=str(out))
    assert "\n" not in str(refusal.value)
    out = runs("constant", **common, steps=5, checkpoint_every=5)
    assert list(losses(runs("constant", **common, epochs=4, resume=str(out)))) == list(range(1, 13))


PARTS = {  # one training of ten steps, handed from rung to rung
    3: {"rung": "single"},
    5: {"rung": "pipeline", "schedule": "zbv", "microbatches": 4, "sharded_checkpoints": True},
    7: {"rung": "ddp"},
    8: {"rung": "model_parallel", "cut": "linear1"},
    9: {"rung": "pipeline", "form": "one-process", "microbatches": 2, "cut": "linear2", "sharded_checkpoints": True},
    10: {"rung": "data_parallel"},
}
BOTH = {"ddp": {"rung": "ddp"}, "pipeline": {"rung": "pipeline", "microbatches": 4, "cut": "layer1"}}
WORLD = {  # ResNet-50 in every rung with one process per device
    "ddp": {"rung": "ddp", "norm": "group"},
    "model_parallel": {"rung": "model_parallel", "cut": "layer2.3"},
    "1f1b": {"rung": "pipeline", "microbatches": 4, "cut": "layer2.3"},
    "gpipe": {"rung": "pipeline", "microbatches": 4, "schedule": "gpipe"},
    "interleaved-1f1b": {"rung": "pipeline", "microbatches": 4, "schedule": "interleaved-1f1b"},
    "interleaved-zero-bubble": {"rung": "pipeline", "microbatches": 4, "schedule": "interleaved-zero-bubble"},
    "zbv": {"rung": "pipeline", "microbatches": 4, "schedule": "zbv"},
}
HERE = {
    "single": {"rung": "single"},
    "single in microbatches": {"rung": "single", "microbatches": 4},
    "single with group norm": {"rung": "single", "norm": "group"},
    "data_parallel": {"rung": "data_parallel", "norm": "group"},
    "model_parallel one process": {"rung": "model_parallel", "form": "one-process", "cut": "layer2.3"},
    "pipeline one process": {"rung": "pipeline", "form": "one-process", "microbatches": 4},
}


def handed_on(folder, jpeg):
    """The settings of PARTS: each stops at its step with a checkpoint, from which the next goes on."""
    runs, before = {}, None
    for stop, rung in PARTS.items():
        resume = {"resume": str(folder / f"to-{before}")} if before else {}
        out = str(folder / f"to-{stop}")
        runs[stop] = {
            "rung": "single",
            "model": "toy",
            "epochs": 2,
            "steps": stop,
            **STORY,
            "checkpoint_every": stop,
            "out": out,
            **rung,
            **resume,
            **jpeg,
        }
        before = stop
    return runs


def resnet50(jpegs, rung, out):
    common = {
        "rung": "single",
        "model": "resnet50",
        "dataset": "folder",
        "data": str(jpegs),
        "image_size": 64,
        "batch_size": 8,
    }
    return {**common, "steps": 2, "log_every": 1, **rung, "out": str(out)}


@pytest.fixture(scope="session")
def world(tmp_path_factory, jpegs):
    """All runs of two processes in one world; returns the folder of their folders."""
    folder = tmp_path_factory.mktemp("world")
    jpeg = {"dataset": "folder", "data": str(jpegs), "image_size": 32, "batch_size": 8, "log_every": 3}
    parts = handed_on(folder, jpeg)
    train(checked(Settings(**parts[3])), World())
    todo = [parts[stop] for stop in (5, 7, 8)]
    for name, rung in BOTH.items():
        common = {"model": "convnet", **rung, **jpeg}
        part = str(folder / f"{name}-part")
        todo += [
            {**common, "epochs": 2, "checkpoint_every": 10, "out": str(folder / f"{name}-whole")},
            {**common, "steps": 7, "checkpoint_every": 7, "out": part},
            {**common, "epochs": 2, "out": part, "resume": part},
        ]
    todo += [resnet50(jpegs, rung, folder / f"resnet50 {name}") for name, rung in WORLD.items()]
    run_worlds(folder, [[2, TRAIN, written(folder / "runs.json", todo)]])
    return folder


@pytest.mark.parametrize("name", BOTH)
def test_resumed_world_equals_uninterrupted(world, name):
    """Two processes, mid-epoch, batch norm, augmented JPEG files: the very same losses and validation."""
    part, whole = world / f"{name}-part", world / f"{name}-whole"
    assert list(losses(whole)) == list(range(1, 11))
    assert losses(part) == losses(whole)
    assert epochs(part) == epochs(whole)


@pytest.mark.parametrize("name", BOTH)
def test_world_validates_what_it_saves(world, runs, jpeg, name):
    """One process that only validates the world's last checkpoint finds the world's own result, batch norm and all."""
    whole = world / f"{name}-whole"
    alone = runs("alone", model="convnet", epochs=2, resume=str(whole), **jpeg)
    assert losses(alone) == {}
    validated, wanted = epochs(alone)[0], epochs(whole)[1]
    assert validated["validation_loss"] == pytest.approx(wanted["validation_loss"], rel=ROUNDING)
    assert validated["validation_accuracy"] == wanted["validation_accuracy"]


def test_any_rung_resumes_any_rungs_checkpoint(world, runs, jpegs, jpeg):
    """One training handed from rung to rung has the losses of one that nobody interrupted."""
    parts = handed_on(world, jpeg)
    for stop in (9, 10):
        train(checked(Settings(**parts[stop])), World())
    whole = losses(runs("whole", model="toy", epochs=2, **STORY, **jpeg))
    together = {step: loss for stop in PARTS for step, loss in losses(parts[stop]["out"]).items()}
    assert far(together, whole) < ROUNDING


@pytest.fixture(scope="session")
def resnets(world, jpegs):
    """ResNet-50 from a JPEG folder in every rung and form: name -> run folder."""
    folders = {name: world / f"resnet50 {name}" for name in WORLD}
    for name, rung in HERE.items():
        folders[name] = world / f"resnet50 {name}"
        train(checked(Settings(**resnet50(jpegs, rung, folders[name]))), World())
    return folders


@pytest.mark.parametrize("name", [*WORLD, *HERE])
def test_resnet50_from_jpegs(resnets, name):
    """Trains, and starts as the single device does that sees the same microbatches."""
    rung = (WORLD | HERE)[name]
    like = "single with group norm" if rung.get("norm") else "single in microbatches" if "microbatches" in rung else ""
    trained, wanted = losses(resnets[name]), losses(resnets[like or "single"])
    assert list(trained) == [1, 2] and all(map(math.isfinite, trained.values()))
    assert trained[1] == pytest.approx(wanted[1], rel=ROUNDING)
    assert trained[2] == pytest.approx(wanted[2], rel=1e-2)  # batch norm on two images multiplies rounding errors
    written = summary(resnets[name])
    assert written["parameters"] == 23_528_522
    assert written["world_size"] == (2 if name in WORLD else 1) == len(written["peak_memory_mib"])
    assert epochs(resnets[name])[0]["validation_loss"] > 0


# checkpoints as files


def state(step):
    empty = {"optimizer": {}, "scheduler": {}, "settings": {}, "length": 9, "epoch": 0, "epoch_steps": [], "random": []}
    return {"model": {"w": torch.full((3,), float(step))}, "step": step, **empty}


KILLED = """
import os, pathlib, signal, sys
sys.path.insert(0, "tests")
from test_training import state
from mpdemo.training.checkpoint import write
write(sys.argv[1] + "/checkpoints", state(1))
pathlib.Path.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
write(sys.argv[1] + "/checkpoints", state(2))
"""


def test_killed_while_writing(tmp_path):
    """Killed between the new file and its name: the older one counts, and the next one sweeps up."""
    environment = {**os.environ, "PYTHONPATH": str(root())}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root(), env=environment, timeout=100)
    folder = tmp_path / "checkpoints"
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001.pt", "step-000002.tmp"]
    assert checkpoint.read(checkpoint.newest(tmp_path))["step"] == 1
    checkpoint.write(folder, state(3))
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001.pt", "step-000003.pt"]


def test_two_newest_are_kept(tmp_path):
    for step in (5, 999_999, 1_000_000, 1_000_001):
        checkpoint.write(tmp_path / "checkpoints", state(step))
    kept = checkpoint.in_order(tmp_path / "checkpoints")
    assert [path.name for path in kept] == ["step-1000000.pt", "step-1000001.pt"]
    assert checkpoint.newest(tmp_path) == kept[-1]


class Code:
    """Unpickled by a careless reader, this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_flipped_bit_is_refused_by_the_checksum(runs):
    """In the weights, where the file still opens and only the numbers would be others."""
    path = checkpoint.newest(runs("run", model="toy", batch_size=512, steps=1, checkpoint_every=1))
    content = bytearray(path.read_bytes())
    weights = checkpoint.read(path)["model"]["linear2.0.weight"].numpy().tobytes()
    content[content.index(weights[:64]) + 10] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match="does not match its checksum"):
        checkpoint.read(path)


def test_a_copy_of_a_checkpoint_does_not_confuse(runs):
    out = runs("run", model="toy", batch_size=512, steps=1, checkpoint_every=1)
    path = checkpoint.newest(out)
    path.with_name("step-000030 (copy).pt").write_bytes(path.read_bytes())
    assert checkpoint.newest(out) == path


@pytest.mark.parametrize("how", ["half", "empty", "noise", "other", "code"])
def test_damaged_checkpoint(tmp_path, how):
    path = checkpoint.write(tmp_path / "checkpoints", state(4))
    whole = path.read_bytes()
    if how == "other":
        torch.save({"weights": torch.zeros(3)}, path)
    elif how == "code":
        torch.save(state(4) | {"epoch_steps": Code(tmp_path / "made")}, path)
    else:
        path.write_bytes({"half": whole[: len(whole) // 2], "empty": b"", "noise": os.urandom(500)}[how])
    with pytest.raises(UserError, match="not a checkpoint of mpdemo or is damaged") as refusal:
        checkpoint.read(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "convnet"}, "--model toy, not convnet"),
        ({"batch_size": 256}, "--batch-size 512, not 256"),
        ({"seed": 1}, "--seed 0, not 1"),
        ({"lr": 0.1}, "--lr 0.01, not 0.1"),
        ({"optimizer": "adamw", "lr": 0.01}, "--optimizer sgd, not adamw"),
        ({"warmup_steps": 3}, "--warmup-steps 0, not 3"),
        ({"lr_schedule": "cosine"}, "--lr-schedule constant, not cosine"),
    ],
)
def test_resume_as_another_training_is_refused(runs, change, said):
    out = runs("run", model="toy", batch_size=512, steps=1, checkpoint_every=1)
    with pytest.raises(UserError, match=said):
        runs("other", **{"model": "toy", "batch_size": 512, "steps": 2} | change, resume=str(out))


def test_a_weight_of_another_shape_is_refused(runs):
    out = runs("run", model="toy", batch_size=512, steps=1, checkpoint_every=1)
    path = checkpoint.newest(out)
    changed = checkpoint.read(path)
    changed["model"]["linear2.0.weight"] = torch.zeros(3)
    torch.save(changed, path)
    with pytest.raises(UserError, match="another model: linear2.0.weight"):
        runs("other", model="toy", batch_size=512, steps=2, resume=str(out))


def test_the_same_command_starts_a_run_and_goes_on_with_it(runs):
    """As a job needs that Slurm puts back into the queue."""
    settings = {"model": "toy", "batch_size": 256, "checkpoint_every": 4, "resume": "auto"}
    whole = losses(runs("whole", model="toy", batch_size=256, steps=8))
    out = runs("run", **settings, steps=4)
    assert list(losses(out)) == [1, 2, 3, 4]
    assert losses(runs("run", **settings, steps=8)) == whole
    assert losses(runs("run", **settings, steps=8)) == whole  # nothing is left to do


def test_the_checkpoint_before_a_damaged_one_is_used(runs, capfd):
    """Both are named; the later losses are those of the run that was never interrupted."""
    settings = {"model": "toy", "batch_size": 256, "checkpoint_every": 2}
    whole, out = losses(runs("whole", **settings, steps=8)), runs("run", **settings, steps=4)
    damaged = checkpoint.newest(out)
    damaged.write_bytes(damaged.read_bytes()[:1000])
    assert losses(runs("run", **settings, steps=8, resume=str(out))) == whole
    said = capfd.readouterr().err
    assert f"{damaged} is not a checkpoint of mpdemo or is damaged" in said and "step-000002.pt" in said


def damage(content, chance):
    """A file's content with a bit flipped, cut off, with a block of zeros or of noise, or with a byte too many."""
    place = chance.randrange(len(content))
    before, after = content[:place], content[place:]
    return {
        "bit": before + bytes([after[0] ^ 1 << chance.randrange(8)]) + after[1:],
        "cut": before,
        "zeros": before + bytes(512) + after[512:],
        "noise": before + chance.randbytes(512) + after[512:],
        "more": before + b"x" + after,
    }[chance.choice(["bit", "bit", "bit", "cut", "zeros", "noise", "more"])]


def test_two_hundred_random_damages_never_change_a_training(runs):
    """The older one is used, or what is read had not changed: dates in the archive, the space between its parts."""
    out = runs("run", model="toy", batch_size=256, steps=4, checkpoint_every=2, optimizer="adamw")
    path, chance, older = checkpoint.newest(out), random.Random(0), 0
    content, whole = path.read_bytes(), checkpoint.read(path)
    for number in range(200):
        path.write_bytes(damage(content, chance))
        state = read_newest(out)
        assert state["step"] == 2 or same(state, whole), number
        older += state["step"] == 2
    assert older > 150


def test_two_hundred_kills_during_a_write_lose_no_checkpoint(run_once, tmp_path):
    done = run_once("tests/programs/killed_writes.py", str(tmp_path), timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    met = int(re.match(r"(\d+) of 200 kills met a write; \d+ checkpoints, none lost", done.stdout)[1])
    assert met > 50


def test_no_checkpoint_that_can_be_read_is_refused(runs):
    out = runs("run", model="toy", batch_size=512, steps=2, checkpoint_every=1)
    for path in checkpoint.in_order(out / "checkpoints"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none before it can be read"):
        runs("other", model="toy", batch_size=512, steps=3, resume=str(out))


def test_a_checkpoint_stays_beside_damaged_newer_ones(tmp_path):
    """A run that went on from before them must not lose what it writes."""
    for step in (30, 40, 22):
        checkpoint.write(tmp_path / "checkpoints", state(step))
    assert [path.name for path in checkpoint.in_order(tmp_path / "checkpoints")][0] == "step-000022.pt"


def test_a_checkpoint_whose_folder_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(RunFailed, match="step-000001.pt could not be written: File exists; the checkpoints before it"):
        checkpoint.write(tmp_path / "checkpoints", state(1))


def test_a_training_goes_on_while_the_disk_is_full(tmp_path):
    """A limit on the size of files stands for the disk: PyTorch meets both as a write that fails."""
    words = [
        "--rung",
        "single",
        "--model",
        "convnet",
        "--batch-size",
        "512",
        "--steps",
        "2",
        "--checkpoint-every",
        "1",
        "--out",
    ]
    command = ["prlimit", "--fsize=100000", sys.executable, "-m", "mpdemo", "train", *words, str(tmp_path)]
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "could not be written: File too large" in line]
    assert len(said) == 2 and "enforce fail" not in done.stderr, done.stderr
    assert list((tmp_path / "checkpoints").iterdir()) == [] and summary(tmp_path)["steps"] == 2


def test_a_diverged_training_ends(tmp_path):
    """Status 1 and one line, before its weights push the good checkpoints out."""
    words = [
        "--rung",
        "single",
        "--model",
        "toy",
        "--lr",
        "1e30",
        "--batch-size",
        "512",
        "--steps",
        "20",
        "--log-every",
        "1",
        "--out",
    ]
    command = [sys.executable, "-m", "mpdemo", "train", *words, str(tmp_path)]
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.search(
        r"mpdemo: error: the loss is (nan|inf) at step \d+: the training diverged; lower --lr", done.stderr
    )
    assert "Traceback" not in done.stderr


def test_two_runs_do_not_share_a_folder(runs, tmp_path):
    first = RunLog(tmp_path / "run", active=True)
    with pytest.raises(UserError, match="another run writes to --out"):
        runs("run", model="toy", batch_size=512, steps=1)
    first.finish({})
    runs("run", model="toy", batch_size=512, steps=1)


# stopping and waiting


@pytest.mark.parametrize("words", [["--rung", "single"], ["--rung", "ddp", "--processes", "2"]], ids=["one", "two"])
def test_sigusr1_leaves_a_checkpoint(words, tmp_path, runs):
    """Slurm's warning before the time limit: a checkpoint, exit status 3, and the resumed run is the same run."""
    out = tmp_path / "run"
    common = {"model": "toy", "batch_size": 128, "epochs": 10_000}
    command = [sys.executable, "-m", "mpdemo", "train", *words, "--log-every", "1", "--out", str(out)]
    command += Settings(rung="single", **common).arguments()[2:]
    environment = {**os.environ, "PYTHONPATH": str(root())}
    child = subprocess.Popen(command, cwd=root(), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or len(lines(out, "step")) < 2:
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.05)
        child.send_signal(signal.SIGUSR1)
        stderr = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 3, stderr
    assert "Traceback" not in stderr
    stopped = max(losses(out))
    assert checkpoint.newest(out).name == f"step-{stopped:06d}.pt"
    assert summary(out)["stopped"] is True and summary(out)["steps"] == stopped
    more = {**common, "epochs": None, "steps": stopped + 2}
    assert far(losses(runs("run", **more, resume=str(out))), losses(runs("whole", **more))) < ROUNDING


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
    counts = []
    for steps in (10, 50):
        form = "one-process" if rung in ("model_parallel", "pipeline") else None
        monkeypatch.setattr("mpdemo.training.stop_signal.INTERVAL", 1e6)  # s; on a busy machine it would come round
        with CountWaits(monkeypatch) as waits:
            runs(f"run{steps}", rung=rung, form=form, model="toy", batch_size=24, steps=steps, log_every=1000)
        counts.append(waits.count)
        monkeypatch.undo()
    assert counts[0] == counts[1] > 0
