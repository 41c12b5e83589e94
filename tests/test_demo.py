"""The main job end to end; speeds are reported, never asserted."""

import json

import pytest
from worlds import forked

from mpdemo import demo
from mpdemo.__main__ import main

ROWS = [  # what a report must hold: a row for each rung and form
    ("single", "one-process", 1),
    ("data_parallel", "one-process", 1),
    ("ddp", "per-device", 2),
    ("model_parallel", "one-process", 1),
    ("model_parallel", "per-device", 2),
    ("pipeline", "one-process", 1),
    ("pipeline", "per-device", 2),
    ("fsdp", "per-device", 2),
    ("tensor", "per-device", 2),
]
NUMBERS = {"images_per_second", "speedup", "bound", "fraction_of_bound", "max_relative_gradient_error"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The shortest demo: its folder and its output."""
    out = tmp_path_factory.mktemp("demo")
    return out, forked(out, main, ["demo", "--all", "--steps", "3", "--out", str(out)])


def test_the_demo_ends_well_and_says_how_to_go_on(finished):
    done = finished[1]
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Every rung was the same training" in done.stdout and "make lab" in done.stdout
    assert demo.FOOT in done.stdout and ("\ndata_parallel (threads): " in done.stdout) == ("CPU" in done.stdout)


def test_the_report_has_a_row_for_each_rung_and_form(finished):
    report = json.loads((finished[0] / "report.json").read_text())
    assert {"machine", "model", "rungs"} <= set(report)
    assert [(r["rung"], r["form"], r["processes"]) for r in report["rungs"]] == ROWS
    for row in report["rungs"]:
        assert all(isinstance(row[name], float) for name in NUMBERS | {"loss", "accuracy"})
        assert row["speedup_interval"] is None and not row["at_bound"]  # of one round
        assert row["max_relative_gradient_error"] < demo.GRADIENTS_EQUAL


def test_every_row_is_the_training_of_a_command_that_is_printed(finished, tmp_path):
    printed = [line for line in finished[1].stdout.splitlines() if line.startswith("mpdemo train")]
    assert [line.split()[3] for line in printed] == [rung for rung, _, _ in ROWS]
    assert all("--warmup-steps 10" in line for line in printed)  # without it, 16 steps learn next to nothing
    pipelines = [line for line in printed if "--rung pipeline" in line]
    assert ["--cut block.1,block.3,block.5" in line for line in pipelines] == [False, True]
    assert forked(tmp_path, main, printed[0].split()[1:]).returncode == 0
    summary = json.loads((finished[0] / "single-one-process" / "summary.json").read_text())
    row = json.loads((finished[0] / "report.json").read_text())["rungs"][0]
    assert (summary["validation_loss"], summary["validation_accuracy"]) == pytest.approx((row["loss"], row["accuracy"]))


def test_a_speed_up_whose_fraction_may_be_1_is_at_the_bound():
    row = {"strategy": "ddp", "form": "per-device", "loss": 1.0, "accuracy": 0.5, "images_per_second": 100.0}
    row |= {"max_relative_gradient_error": 1e-6, "speedup": 1.6, "speedup_interval": [1.5, 1.7], "bound": 2.0}
    far = row | {"fraction_of_bound": 0.8, "fraction_interval": [0.7, 0.9], "at_bound": False}
    few = far | {"speedup_interval": None, "fraction_interval": None}
    near = far | {"fraction_interval": [0.7, 1.0], "at_bound": True}
    _, *lines = (" ".join(line.split()) for line in demo.table([far, near, few]).splitlines())
    assert "1.60 (1.50 to 1.70) 2.00 0.80 (0.70 to 0.90) 1.0e-06" in lines[0]
    assert "1.60 (1.50 to 1.70) 2.00 0.80 (0.70 to 1.00), at the bound 1.0e-06" in lines[1]
    assert "100 1.60 2.00 0.80 1.0e-06" in lines[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "3"], "does not divide by 3"),
        (["--steps", "2"], "--steps 2 is not allowed; allowed: 3 or more"),
    ],
)
def test_what_a_row_cannot_do_is_refused_before_anything_is_trained(words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "check_room", lambda processes: None)
    assert main(["demo", *words, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_relative_gradient_error", 1e-3), ("max_relative_gradient_error", float("nan")), ("loss", 0.2)],
)
def test_another_training_is_an_error(key, value, capsys):
    rows = [
        {"rung": rung, "form": form, "max_relative_gradient_error": 1e-6, "loss": 0.1} for rung, form, _ in ROWS[:3]
    ]
    assert demo.same_training(rows)
    rows[2][key] = value
    assert not demo.same_training(rows)
    assert "NOT the same training: ddp (per-device)" in capsys.readouterr().err
