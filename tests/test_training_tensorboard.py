"""TensorBoard's part of a run's folder says what ``metrics.jsonl`` says, each step once, also after a resume."""

import pytest
from test_training import lines

from mpdemo.notebook.tables import scalars
from mpdemo.run import train
from mpdemo.settings import Settings, checked
from mpdemo.world.env import World

SETTINGS = {"rung": "single", "model": "toy", "batch_size": 512, "log_every": 2, "tensorboard": True, "lr": 0.02}
RECIPE = {"warmup_steps": 2, "lr_schedule": "cosine", "epochs": 3}  # three steps an epoch


def run(out, **settings):
    """Train in this process; return what TensorBoard reads in the folder, and the folder."""
    assert train(checked(Settings(**SETTINGS | {"out": str(out)} | settings)), World()) == 0
    return scalars(out / "tensorboard"), out


def agree(logged, out):
    """Compare tag by tag."""
    names = {f"train/{name}": ("step", name) for name in ("loss", "images_per_second")}
    names |= {f"validation/{name}": ("epoch", f"validation_{name}") for name in ("loss", "accuracy")}
    for tag, (event, name) in names.items():
        assert logged[tag] == [(row["step"], pytest.approx(row[name])) for row in lines(out, event)], tag


def test_a_whole_run_and_a_new_one_in_its_folder(tmp_path):
    logged, out = run(tmp_path, **RECIPE)
    agree(logged, out)
    assert [step for step, _ in logged["validation/loss"]] == [3, 6, 9]
    rates = [value for _, value in logged["train/learning_rate"]]
    assert rates[:3] == pytest.approx([0.01, 0.02, 0.02])
    assert rates[3:] == sorted(rates[3:], reverse=True) and 0 < rates[-1] < 0.002
    agree(*run(tmp_path, steps=2))
    assert len(scalars(tmp_path / "tensorboard.previous")["train/loss"]) == 9  # kept, as metrics.previous.jsonl is


@pytest.mark.parametrize("stop", [3, 4], ids=["at the end of an epoch", "within an epoch"])
def test_a_resumed_run_has_every_step_once(tmp_path, stop):
    whole, _ = run(tmp_path / "whole", **RECIPE)
    part = tmp_path / "part"
    run(part, **RECIPE, steps=5, checkpoint_every=stop)  # continues after its checkpoint
    logged, out = run(part, **RECIPE, resume=str(part))
    agree(logged, out)
    assert [step for step, _ in logged["train/loss"]] == list(range(1, 10))
    for tag in ("train/loss", "train/learning_rate", "validation/loss"):
        assert logged[tag] == [(step, pytest.approx(value)) for step, value in whole[tag]], tag


def test_a_run_that_began_without_it(tmp_path):
    run_without = {**RECIPE, "steps": 4, "checkpoint_every": 4, "tensorboard": False, "out": str(tmp_path)}
    train(checked(Settings(**SETTINGS | run_without)), World())
    assert not (tmp_path / "tensorboard").exists()
    agree(*run(tmp_path, **RECIPE, resume="auto"))


def test_without_the_package_one_line_says_so(run_mpdemo, tmp_path):
    """A package of this name that cannot be found: Python looks into the first folder first."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['tensorboard'] = None\n")
    words = ["--rung", "ddp", "--tensorboard", "--out", str(tmp_path / "run")]
    done = run_mpdemo("train", *words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "--tensorboard needs the package tensorboard" in done.stderr and "pip install tensorboard" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_it_and_not_the_run(run_mpdemo, tmp_path):
    """A limit on the size of files stands for the disk; TensorBoard's is the largest."""
    limit = "import resource as r\nr.setrlimit(r.RLIMIT_FSIZE, (7300, 7300))\n"
    (tmp_path / "sitecustomize.py").write_text(limit)
    words = ["--rung", "single", "--model", "toy", "--batch-size", "32", "--steps", "48", "--log-every", "1000"]
    done = run_mpdemo("train", *words, "--tensorboard", "--out", str(tmp_path / "run"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stderr == "mpdemo: --tensorboard ends here: File too large; the run continues\n"
