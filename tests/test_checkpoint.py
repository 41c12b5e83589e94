"""Checkpoints as files: killed, damaged, on a full disk; and what a run refuses to resume."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_training import losses, run_here, summary
from worlds import forked

from mpdemo import models
from mpdemo.errors import RunFailed, UserError
from mpdemo.paths import root
from mpdemo.training import checkpoint, setup
from mpdemo.training.log import RunLog

TOY = {"model": "toy", "batch_size": 512}
KILLS = 60
STATE = {"scheduler": {}, "settings": {}, "length": 9, "epoch": 0, "epoch_steps": []}


@pytest.fixture
def runs(tmp_path):
    """Train in this process: run("name", **settings) -> its folder."""
    return lambda name, **settings: run_here(tmp_path / name, **settings)


def write(folder, step, model=None):
    """Write a checkpoint, of the toy model by default, without a training run."""
    model = model or models.build("toy")
    checkpoint.save(folder / "checkpoints", model, torch.optim.SGD(model.parameters(), 0.1), STATE | {"step": step})
    return folder / f"checkpoints/step-{step:06d}"


def test_two_newest_are_kept(tmp_path):
    for step in (5, 999_999, 1_000_000, 1_000_001):
        last = write(tmp_path, step)
    kept = checkpoint.in_order(tmp_path / "checkpoints")
    assert [path.name for path in kept] == ["step-1000000", "step-1000001"]
    assert checkpoint.newest(tmp_path) == kept[-1] == last
    assert {file.suffix for file in last.iterdir()} == {".safetensors", ".pt"}
    shutil.copytree(last, last.with_name("step-1000002 (copy)"))  # as a file manager makes one
    assert checkpoint.newest(tmp_path) == last
    write(tmp_path, 22)  # by a run that resumed one before damaged newer ones: it must not lose what it writes
    assert checkpoint.in_order(tmp_path / "checkpoints")[0].name == "step-000022"


class Code:
    """Unpickled by a careless reader, this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["empty", "other", "code", "without"])
def test_damaged_checkpoint(tmp_path, how):
    write(tmp_path, 3)
    path = write(tmp_path, 4)
    file, state = path / "state.pt", checkpoint.read(path)
    if how == "other":
        torch.save({"weights": torch.zeros(3)}, file)
    elif how == "code":
        torch.save(state | {"epoch_steps": Code(tmp_path / "made")}, file)
    elif how == "without":
        next(path.glob("*.safetensors")).unlink()
    else:
        file.write_bytes(b"")
    with pytest.raises(UserError, match="not a checkpoint of mpdemo or is damaged") as refusal:
        checkpoint.read(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "made").exists()
    assert checkpoint.read_newest(tmp_path)["step"] == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "convnet"}, "--model toy, not convnet"),
        ({"batch_size": 256}, "--batch-size 512, not 256"),
        ({"optimizer": "adamw", "lr": 0.01}, "--optimizer sgd, not adamw"),
        ({"lr_schedule": "cosine"}, "--lr-schedule constant, not cosine"),
    ],
)
def test_resume_as_another_training_is_refused(runs, change, said):
    out = runs("run", **TOY, steps=1, checkpoint_every=1)
    with pytest.raises(UserError, match=said):
        runs("other", **TOY | {"steps": 2} | change, resume=str(out))


def test_a_checkpoint_that_names_settings_that_are_gone_is_resumed(runs):
    whole, out = losses(runs("whole", **TOY, steps=2)), runs("run", **TOY, steps=1, checkpoint_every=1)
    file = checkpoint.newest(out) / "state.pt"
    state = torch.load(file)
    state["settings"] |= {"channels_last": True, "mesh": "pp-dp", "reshard": "never", "tensorboard": True}
    torch.save(state, file)
    assert losses(runs("run", **TOY, steps=2, resume=str(out))) == whole


def test_another_model_is_refused(runs, monkeypatch):
    """The settings are the same, as where a folder of images has one class more than before."""
    out = runs("run", **TOY, steps=1, checkpoint_every=1)
    load = setup.load
    monkeypatch.setattr(setup, "load", lambda *place: replace(load(*place), classes=11))
    with pytest.raises(UserError, match="the checkpoint is of another model: .* is missing or of another shape"):
        runs("other", **TOY | {"steps": 2}, resume=str(out))


def test_the_same_command_starts_a_run_and_resumes_it(runs):
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
    (damaged / "state.pt").write_bytes((damaged / "state.pt").read_bytes()[:1000])
    assert losses(runs("run", **settings, steps=8, resume=str(out))) == whole
    said = capfd.readouterr().err
    assert f"{damaged} is not a checkpoint of mpdemo or is damaged" in said and "step-000002" in said


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


def test_random_damages_never_change_a_training(runs):
    """The older one is used, or what is read had not changed: dates in the archive, the space between its parts."""
    out = runs("run", model="toy", batch_size=256, steps=4, checkpoint_every=2, optimizer="adamw")
    path, chance, older = checkpoint.newest(out), random.Random(0), 0
    state = checkpoint.read(path)
    for file in path.iterdir():
        content = file.read_bytes()
        for number in range(30):
            file.write_bytes(damage(content, chance))
            found = checkpoint.read_newest(out)
            same = found["small"] == state["small"] and found["epoch_steps"] == state["epoch_steps"]
            assert found["step"] == 2 or same, number
            older += found["step"] == 2
        file.write_bytes(content)
    assert older > 45 and checkpoint.read_newest(out)["step"] == 4


def kill_writers(folder):
    """Fork a writer of checkpoints again and again, and kill it at some moment; nothing it had finished may be lost.

    Run it in a process of its own, in which PyTorch has started no thread. Returns a text where too few kills met a
    write, which then leaves its temporary folder.
    """
    model, chance, step, met = torch.nn.Linear(2**19, 1), random.Random(0), 1, 0  # 2 MiB
    write(folder, step, model)
    for _ in range(KILLS):
        finished, pipe = os.pipe()
        child = os.fork()
        if child == 0:
            for number in itertools.count(step + 1):
                write(folder, number, model)
                os.write(pipe, b".")
        os.close(pipe)
        time.sleep(chance.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        written = len(os.read(finished, 1000))
        os.close(finished)
        met += bool(list((folder / "checkpoints").glob("*.tmp")))
        newest = checkpoint.read(checkpoint.newest(folder))["step"]
        assert newest >= step + written, (newest, step, written)
        step = newest
    return None if met > KILLS / 4 else f"only {met} of {KILLS} kills met a write"


def test_kills_during_a_write_lose_no_checkpoint(tmp_path):
    done = forked(tmp_path, kill_writers, tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_checkpoint_whose_folder_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(RunFailed, match="step-000001 could not be written: .*; the checkpoints before it stay"):
        write(tmp_path, 1)


@pytest.mark.nightly
def test_a_training_continues_while_the_disk_is_full(tmp_path):
    """A limit on the size of files stands for the disk. Each time one line, from rank 0 alone, and no half folder."""
    words = ["--rung", "ddp", "--processes", "2", "--oversubscribe", "--model", "convnet", "--batch-size", "512"]
    words += ["--steps", "2", "--checkpoint-every", "1", "--out", str(tmp_path)]
    command = ["prlimit", "--fsize=30000", sys.executable, "-m", "mpdemo", "train", *words]
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "could not be written: File too large; the checkp" in line]
    assert len(said) == 2 and "enforce fail" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert list((tmp_path / "checkpoints").iterdir()) == [] and summary(tmp_path)["steps"] == 2


def test_a_diverged_training_ends(runs):
    """Status 1 and one line (see `RunFailed`), before its weights push the good checkpoints out."""
    with pytest.raises(RunFailed, match=r"^the loss is (nan|inf) at step \d+: the training diverged; lower --lr"):
        runs("run", **TOY, lr=1000, steps=20, log_every=1)


def test_two_runs_do_not_share_a_folder(runs, tmp_path):
    first = RunLog(tmp_path / "run", active=True)
    with pytest.raises(UserError, match="another run writes to --out"):
        runs("run", **TOY, steps=1)
    first.finish({})
    runs("run", **TOY, steps=1)
