"""The demo end to end; speeds are reported, never asserted."""

import contextlib

import pytest

from mpdemo import demo
from mpdemo.__main__ import main
from mpdemo.settings import RUNGS


def test_the_demo_trains_every_strategy_alike_and_says_how_to_go_on(run_mpdemo):
    """The shortest one: a single step is timed."""
    done = run_mpdemo("demo", "--steps", "1", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    heading, *rows = done.stdout.splitlines()[:8]
    assert heading.split()[:2] == ["strategy", "loss"] and demo.FOOT in done.stdout
    # which needs four
    assert [row.split()[0] for row in rows] == [rung for rung in RUNGS if rung != "hybrid"]
    losses = [float(row.replace("(threads)", "").split()[1]) for row in rows]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3) and 0 < losses[0] < 3
    assert all(float(row.split()[-1]) < demo.GRADIENTS_EQUAL for row in rows)
    assert "Every strategy was the same training." in done.stdout and "make lab" in done.stdout


def test_a_speed_up_whose_fraction_may_be_1_is_at_the_bound():
    row = {"strategy": "ddp", "loss": 1.0, "images_per_second": 100.0}
    row |= {
        "max_relative_gradient_error": 1e-6,
        "speedup": 1.6,
        "speedup_interval": [1.5, 1.7],
        "bound": 2.0,
    }
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
        (["--processes", "1"], "'1' is not a whole number from 2 to 64"),
        (["--steps", "0"], "'0' is not a whole number from 1 to 10000"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused_before_anything_is_trained(words, said, monkeypatch, capsys):
    monkeypatch.setattr(demo, "check_room", lambda processes: None)
    with contextlib.suppress(SystemExit):  # of argparse, for a number
        assert main(["demo", *words]) == 2
    assert said in capsys.readouterr().err


def test_four_processes_also_run_the_hybrid():
    assert "hybrid" in demo.variants(4) and "tensor" not in demo.variants(4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_relative_gradient_error", 1e-3), ("max_relative_gradient_error", float("nan")), ("loss", 0.2)],
)
def test_another_training_is_told(key, value):
    row = {"max_relative_gradient_error": 1e-6, "loss": 0.1}
    assert demo.same_training(row, row) and not demo.same_training(row | {key: value}, row)
