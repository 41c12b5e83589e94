"""The main job end to end; speeds are reported, never asserted."""

import json

import pytest

from mpdemo import demo

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
def finished(tmp_path_factory, run_once):
    """One short demo: its folder and its output."""
    out = tmp_path_factory.mktemp("demo")
    done = run_once("-m", "mpdemo", "demo", "--all", "--steps", "5", "--out", str(out))
    return out, done


def test_the_demo_ends_well_and_says_how_to_go_on(finished):
    done = finished[1]
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Every rung was the same training" in done.stdout and "make lab" in done.stdout


def test_the_report_has_a_row_for_each_rung_and_form(finished):
    report = json.loads((finished[0] / "report.json").read_text())
    assert {"machine", "model", "rungs"} <= set(report)
    assert [(r["rung"], r["form"], r["processes"]) for r in report["rungs"]] == ROWS
    for row in report["rungs"]:
        assert all(isinstance(row[name], float) for name in NUMBERS | {"loss", "accuracy"})
        assert row["fraction_of_bound"] == pytest.approx(row["speedup"] / row["bound"])
        assert row["max_relative_gradient_error"] < demo.GRADIENTS_EQUAL


def test_every_row_is_the_training_of_a_command_that_is_printed(finished, run_once):
    printed = [line for line in finished[1].stdout.splitlines() if line.startswith("python -m mpdemo train")]
    assert [line.split()[5] for line in printed] == [rung for rung, _, _ in ROWS]
    pipelines = [line for line in printed if "--rung pipeline" in line]
    assert ["--cut block.1,block.3,block.5" in line for line in pipelines] == [False, True]
    assert run_once(*printed[0].split()[1:]).returncode == 0
    summary = json.loads((finished[0] / "single-one-process" / "summary.json").read_text())
    row = json.loads((finished[0] / "report.json").read_text())["rungs"][0]
    assert (summary["validation_loss"], summary["validation_accuracy"]) == pytest.approx((row["loss"], row["accuracy"]))


def test_no_speed_up_in_the_table_exceeds_its_limit():
    row = {"rung": "ddp", "form": "per-device", "loss": 1.0, "accuracy": 0.5, "images_per_second": 100.0}
    row |= {"max_relative_gradient_error": 1e-6, "speedup_quartiles": [1.9, 2.1], "bound": 2.0}
    far = row | {"speedup": 1.6, "fraction_of_bound": 0.8, "at_bound": False}
    at = row | {"speedup": 2.05, "fraction_of_bound": 1.025, "at_bound": True}
    _, first, second = demo.table([far, at]).splitlines()
    assert first.split()[-4:] == ["1.60", "2.00", "80%", "1.0e-06"]
    assert "2.05" not in second and "1.90-2.10  the same, within the noise" in second


def test_what_a_row_cannot_do_is_refused_before_anything_is_trained(run_mpdemo, tmp_path):
    done = run_mpdemo("demo", "--processes", "3", "--oversubscribe", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "does not divide by 3" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists() and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_relative_gradient_error", 1e-3), ("max_relative_gradient_error", float("nan")), ("loss", 0.2)],
)
def test_another_training_is_an_error(key, value, capsys):
    rows = [
        {"rung": rung, "form": form, "max_relative_gradient_error": 1e-6, "loss": 0.1} for rung, form, _ in ROWS[:3]
    ]
    assert demo.verdict(rows) == 0
    rows[2][key] = value
    assert demo.verdict(rows) == 1
    assert "NOT the same training: ddp (per-device)" in capsys.readouterr().err
