"""The benchmark's cases can run, and its table says the figures; speeds are never asserted."""

import functools
import json
from types import SimpleNamespace

import pytest

from mpdemo import bench
from mpdemo.compare import Comparison
from mpdemo.schedules import SCHEDULES
from mpdemo.settings import checked
from mpdemo.trial import is_per_device
from mpdemo.world.env import World


@pytest.mark.parametrize("part", ["ddp", "pipeline", "hybrid"])
def test_every_case_can_run_in_its_processes(part):
    for variants in bench.cases(part):
        assert list(variants)[0] == "single" and len({settings.model for settings in variants.values()}) == 1
        for settings in variants.values():
            checked(settings, bench.PROCESSES[part] if is_per_device(settings) else None)
    names = {settings.schedule for variants in bench.cases(part) for settings in variants.values()}
    assert part == "ddp" or names == set(SCHEDULES)


def test_predictions_are_summed_up():
    memory = [
        {"predicted": [101, 99], "counted": [100, 100], "messages": 1, "predicted_messages": 1},
        {"predicted": [97, 100], "counted": [100, 100], "messages": 1, "predicted_messages": 2},
    ]
    peaks, messages = bench.memory({"rows": memory})
    assert peaks[:2] == ("predicted peak memory of 2 runs", "off by 2.0%, at most 3.0%") and messages[1] == "1 of 2"
    times = [{"case": "--rung single", "ratio": 9}, {"case": "--rung ddp", "ratio": 0.95}]
    assert bench.step_times({"rows": times}) == [("predicted step time of 1 runs", "off by 5%, at most 5%", "10 %", "")]


def test_the_loops_are_compared_and_nothing_is_left_behind(run_once, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = run_once("-m", "mpdemo", "bench", "--only", "loop", "--out", str(tmp_path), TMPDIR=str(scratch))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {row[0] for row in report["table"]} == {"Lightning, over a bare loop", "our loop, over a bare loop"}
    assert report["results"]["loop"]["step_seconds"]["bare loop"] > 0 and "| comparison " in done.stdout
    assert list(scratch.iterdir()) == []  # torchrun would leave its logs, PyTorch its caches


def test_the_second_of_two_equal_steps_is_counted():
    steps, comparison = [], Comparison(World())
    for name in "ab":
        step = functools.partial(lambda name, batch: steps.append(name), name)
        comparison.trials[name] = SimpleNamespace(step=step, devices=())
    comparison.run(rounds=2, warmup=1, again=True)
    assert "".join(steps) == 3 * "aabb"
    assert [len(comparison.seconds[name]) for name in "ab"] == [2, 2]
