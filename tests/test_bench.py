"""The benchmark ends and keeps its rows, and the README's table says what they say; speeds are never asserted."""

import functools
import json
from types import SimpleNamespace

import pytest

from mpdemo.__main__ import main
from mpdemo.bench import pipelines
from mpdemo.bench import readme as bench_readme
from mpdemo.compare import Comparison
from mpdemo.paths import root
from mpdemo.plan import SCHEDULES
from mpdemo.plan.footprint import estimate, footprints
from mpdemo.plan.planner import Workload
from mpdemo.world.env import World

SPREAD = [0.9, 1.1]
PIPELINE = {
    "step_quartiles": SPREAD,
    "speedup": 1.5,
    "fraction_of_bound": 0.97,
    "measured_idle_share": 0.21,
    "predicted_idle_share": 0.20,
    "recorder_share": 0.001,
}
RESULTS = {
    "machine": {"date": "2026-01-02", "rounds": 7, "device": "one CPU core", "processor": "Z80", "torch": "2.15.0+x"},
    "loop": [{"added_seconds": 2e-4, "added_share": 0.15}, {"added_seconds": 0.0, "added_share": 0.004}],
    "ddp": [
        {"rung": "fsdp", "model": "resnet18", "image_size": 64, "batch": 64, "speedup": 1.8, "bound": 1.9}
        | {"speedup_quartiles": SPREAD, "fraction_of_bound": 0.95, "fraction_quartiles": SPREAD}
    ],
    "hybrid": [
        {"schedule": schedule, "model": "t", "batch": batch, "speedup": x, "speedup_quartiles": SPREAD}
        | {"fraction_of_bound": share}
        for schedule, batch, x, share in (("gpipe", 8, 1.4, 0.8), ("zbv", 8, 1.6, 0.9), ("gpipe", 32, 1.9, 0.96))
    ],
    "pipeline": [
        PIPELINE | {"model": model, "batch": 32, "schedule": "1f1b", "microbatches": 8, "cut": cut, "step_seconds": s}
        for model, cut, s in (
            ("convstack", "a", 1.0),
            ("transformer", "a", 1.0),
            ("resnet101", "layer2.3", 6.0),
            ("resnet101", "layer3.6", 4.0),
        )
    ],
    "memory": [{"off_by": 0.01, "messages_equal": True}, {"off_by": 0.03, "messages_equal": False}],
    "step_times": [
        {"case": f"--rung {rung}", "predicted": predicted, "measured": measured, "ratio": ratio}
        | {"ratios": [ratio - 0.04, ratio + 0.06]}
        | {"recommended": rung == "b"}
        for rung, predicted, measured, ratio in (
            ("single", 1.1, 1.0, 1.1),
            ("single --accumulate 4", 5.0, 1.0, 5.0),
            ("ddp", 0.76, 1.0, 0.95),
            ("a", 0.816, 1.0, 1.02),
            ("b", 1.28, 2.0, 0.8),
        )
    ],
    "planner": [
        {"model": "resnet50", "schedule": s, "microbatches": 4, "of": 20, "speedup": x, "speedup_quartiles": SPREAD}
        | {"planned_seconds": planned, "step_seconds": 2.0}
        for s, x, planned in (("zbv", 1.0, 1.98), ("1f1b", 1.02, 1.9), ("gpipe", 0.9, 2.3))
    ],
}


def test_the_rows_of_the_pipeline_benchmark(run_once, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_once(*launcher, "tests/programs/bench_rows.py", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["schedule"], r["microbatches"]) for r in rows] == [("naive", 1), ("1f1b", 4), ("zbv", 4)]
    assert rows[0]["speedup"] == 1.0
    assert rows[0]["predicted_idle_share"] == pytest.approx(0.5)  # one of two devices is always idle
    for row in rows:
        assert 0 <= row["measured_idle_share"] < 1 and row["simulated_seconds"] > 0
        assert 0 < row["fraction_of_bound"] < 1.5 and 0 < row["recorder_share"] < 0.5  # a toy's steps are short


def test_the_loop_benchmark_ends_and_keeps_its_rows(run_once, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = ("-m", "mpdemo", "bench", "--only", "loop", "--rounds", "3", "--out", str(tmp_path))
    done = run_once(*words, TMPDIR=str(scratch))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "loop.json").read_text())
    assert [row["model"] for row in rows] == ["toy", "convnet"] and rows[1]["loop_over_bare"] > 0
    assert abs(rows[1]["added_share"]) < abs(rows[0]["added_share"])  # the same seconds of a longer step
    assert list(scratch.iterdir()) == []  # torchrun would leave its logs, PyTorch its caches


def test_the_second_of_two_equal_steps_is_counted():
    steps, comparison = [], Comparison(World())
    for name in "ab":
        step = functools.partial(steps.append, name)
        comparison.trials[name] = SimpleNamespace(step=step, devices=(), all_cores=False)
    comparison.run(rounds=2, warmup=1, again=True)
    assert "".join(steps) == 3 * "aabb"
    assert [len(comparison.seconds[name]) for name in "ab"] == [2, 2]


def test_the_planners_choice_runs_against_every_schedule_and_the_cuts_beside_it():
    sizes = [32 // count for count in pipelines.COUNTS]
    workload = Workload(footprints("resnet18", 64), estimate("resnet18", sizes, 64, "v100"), ranks=2, batch=32)
    best, *others = pipelines.choices(workload)
    ways = [(c.schedule, c.microbatches, tuple(c.points)) for c in (best, *others)]
    assert len(set(ways)) == len(ways)
    runnable = {(s, m) for s in SCHEDULES if s != "naive" for m in pipelines.COUNTS}
    assert {way[:2] for way in ways} == runnable
    beside = [way[2] for way in ways if way[:2] == ways[0][:2]]
    for i, point in enumerate(best.points):
        assert {points[i] for points in beside} == {point - 1, point, point + 1} & set(range(1, len(workload.blocks)))
    assert best.step_time <= 1.01 * min(c.step_time for c in others)


def test_the_table_stands_between_the_marks_and_says_the_figures(tmp_path):
    readme, folder = tmp_path / "README.md", tmp_path / "bench"
    folder.mkdir()
    measured = [name for name in RESULTS if name != "machine"]
    for name, rows in RESULTS.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    readme.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    bench_readme.update(readme, folder, measured)
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench -->\nMeasured on 2026-01-02") and text.endswith(
        "<!-- /bench -->\nafter\n"
    )
    assert "the largest | 2.0%, 3.0% | 5 % |" in text and "every byte was predicted | 1 of 2 |" in text
    assert "`plan` recommends (`--rung b`), and the one predicted fastest (`--rung ddp`), over the fastest " in text
    assert "| 3 of 4; 2.00, 1.00 | all; 1.03 |" in text
    assert "3 trainings of the story on two processes" in text
    assert "(of the single predictions 4 of 6 are within 10%) | 5%, 20% | 10 % |" in text
    assert "this choice and the 2 fastest others, predicted once beforehand: off by, the median and the" in text
    assert "largest | 5%, 15% | 10 % |" in text
    assert "| FSDP, 2 processes, resnet18, 64 px, batch 64: speed-up over one |" in text
    assert "old" not in text and "over 7 interleaved rounds" in text and "Z80" in text
    assert "the fastest schedule (zbv) over one; share, of all schedules | 1.60 [0.90-1.10] | the sim" in text
    assert "t, batch 8: speed-up" in text and "as many cores | 0.80-0.90 |" in text
    assert "t, batch 32: speed-up" in text and "as many cores | 0.96-0.96 |" in text
    assert "1.80 [0.90-1.10] | 1.90, two independent processes | 0.95 [0.90-1.10]" in text
    assert "200 µs, over a bare ConvNet step | 0.4 %" in text and "1.50 times faster" in text
    assert "the fastest of 19 others (1f1b, 4) | 1.02 [0.90-1.10]" in text
    assert "| 1f1b | 1.50 (0.97; 0.21, 0.20) |" in text and "| 1.78 |" in text
    bench_readme.update(readme, folder, measured)
    assert readme.read_text() == text
    bench_readme.update(readme, folder, [name for name in measured if name != "hybrid"])
    assert "hybrid, 2 replicas" in text and "hybrid, 2 replicas" not in readme.read_text()  # of an earlier call


def test_the_readme_has_the_marks():
    before, after = bench_readme.around(root() / "README.md")
    assert "How fast" in before and after.strip()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--readme nowhere.md", "allowed is a file with the lines"),
        ("--readme README.md --only ddp", "wants figures of one call"),
        ("--only speed", "allowed parts loop, ddp, pipeline, hybrid, planner"),
        ("--rounds 2", "3 rounds or more"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(capsys, tmp_path, words, said):
    assert main(["bench", "--out", str(tmp_path / "bench"), *words.split()]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()


def test_a_file_in_place_of_the_folder_is_refused(capsys, tmp_path):
    (tmp_path / "bench").touch()
    assert main(["bench", "--out", str(tmp_path / "bench")]) == 2
    assert "bench: File exists; name another folder" in capsys.readouterr().err
