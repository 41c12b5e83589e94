"""Checkpoints that every process writes its part of. That rungs hand them on is tested with the rungs.

Here one process writes them; what is tested does not depend on how many do.
"""

import random
import shutil
import subprocess
import sys

import pytest
import torch
from soak import same, tensors_of
from test_training import damage, losses, run_here

from mpdemo.errors import RunFailed, UserError
from mpdemo.paths import root
from mpdemo.training import checkpoint, sharded
from mpdemo.training.resume import read_newest

SETTINGS = {"model": "toy", "batch_size": 256, "checkpoint_every": 2, "optimizer": "adamw"}


@pytest.fixture
def runs(tmp_path):
    """Train in this process: run("name", **settings) -> its folder."""
    return lambda name, **settings: run_here(tmp_path / name, **settings)


@pytest.fixture
def run(runs):
    """The folder of a run with two sharded checkpoints."""
    return runs("run", **SETTINGS, steps=4, sharded_checkpoints=True)


def test_the_tensors_are_in_the_folder_and_nothing_else_is(run, runs):
    path = checkpoint.newest(run)
    state, wanted = checkpoint.read(path), checkpoint.read(checkpoint.newest(runs("whole", **SETTINGS, steps=4)))
    assert state["model"] == {} and all(set(values) == {"step"} for values in state["optimizer"].values())
    expected = {f"model.{name}": weight for name, weight in wanted["model"].items()}
    for name, values in wanted["optimizer"].items():
        expected |= {f"optimizer.{name}.{key}": value for key, value in values.items() if value.dim()}
    assert same(tensors_of(path), expected)
    assert {file.suffix for file in sharded.folder_of(path).iterdir()} == {".safetensors"}


def test_resumed_equals_uninterrupted(run, runs):
    """Whole files and sharded ones in one training, bit for bit."""
    whole = runs("whole", **SETTINGS, steps=8)
    assert losses(runs("run", **SETTINGS, steps=6, resume="auto")) == {k: v for k, v in losses(whole).items() if k < 7}
    end = runs("run", **SETTINGS, steps=8, resume="auto", sharded_checkpoints=True)
    assert losses(end) == losses(whole)
    expected = {f"model.{name}": weight for name, weight in checkpoint.read(checkpoint.newest(whole))["model"].items()}
    assert same({k: v for k, v in tensors_of(checkpoint.newest(end)).items() if k in expected}, expected)


def test_thirty_random_damages_are_refused_and_the_older_one_used(run):
    newest, chance = checkpoint.newest(run), random.Random(0)
    (file,) = sharded.folder_of(newest).iterdir()
    content = file.read_bytes()
    for number in range(30):
        file.write_bytes(damage(content, chance))
        assert read_newest(run)["step"] == 2 or file.read_bytes() == content, number
    file.write_bytes(content)
    assert read_newest(run)["step"] == 4


@pytest.mark.parametrize("how", ["without", "another"])
def test_a_folder_that_is_not_the_files_is_refused(run, how):
    newest = checkpoint.newest(run)
    shutil.rmtree(sharded.folder_of(newest))
    if how == "another":
        shutil.copytree(run / "checkpoints/step-000002", sharded.folder_of(newest))
    with pytest.raises(UserError, match="the files in step-000004/ do not match their checksums"):
        checkpoint.read(newest)


def test_another_model_is_refused(run, runs):
    path = checkpoint.newest(run)
    state = checkpoint.read(path)
    state["settings"]["model"] = "convnet"
    torch.save(state, path)
    with pytest.raises(UserError, match="the checkpoint is of another model: .* is missing or of another shape"):
        runs("other", **SETTINGS | {"model": "convnet"}, steps=5, resume=str(run))


def test_what_a_killed_write_leaves_is_swept_up(run, runs):
    """The file comes last: without it the folder is nobody's, also with a part of a larger world in it."""
    for step in (5, 6):
        left = run / f"checkpoints/step-00000{step}"
        left.mkdir()
        (left / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"half of it")
    assert read_newest(run)["step"] == 4
    end = runs("run", **SETTINGS, steps=6, resume="auto", sharded_checkpoints=True)
    kept = ["step-000004", "step-000004.pt", "step-000006", "step-000006.pt"]
    assert sorted(path.name for path in (end / "checkpoints").iterdir()) == kept
    assert read_newest(end)["step"] == 6


def test_tensors_whose_file_cannot_be_written_do_not_stay(run):
    """Here a folder has the temporary name; on a full disk they would keep it full."""
    state = checkpoint.read(checkpoint.newest(run))
    (run / "checkpoints/step-000009.tmp").mkdir()
    (run / "checkpoints/step-000009").mkdir()
    with pytest.raises(RunFailed, match="step-000009.pt could not be written: Is a directory"):
        checkpoint.write(run / "checkpoints", state | {"step": 9})
    assert not (run / "checkpoints/step-000009").exists() and read_newest(run)["step"] == 4


def test_a_training_goes_on_while_the_disk_is_full(tmp_path):
    """Each time one line, from rank 0 alone, and no half folder."""
    words = ["--rung", "ddp", "--model", "toy", "--batch-size", "512", "--steps", "2", "--checkpoint-every", "1"]
    words += ["--sharded-checkpoints", "--processes", "2", "--oversubscribe", "--out", str(tmp_path)]
    command = ["prlimit", "--fsize=30000", sys.executable, "-m", "mpdemo", "train", *words]
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "could not be written: File too large; the checkp" in line]
    assert len(said) == 2 and "Traceback" not in done.stderr, done.stderr
    assert list((tmp_path / "checkpoints").iterdir()) == []
