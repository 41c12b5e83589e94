"""The ladder so far: its table and its chart from a folder of runs, and the job that measures a rung's row."""

import json

import pytest
from worlds import run_worlds

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.labs import speed as lab
from mpdemo.measure.compare import THREADS
from mpdemo.measure.paired import from_row, ratio
from mpdemo.notebook import ladder

MIB = 2**20
CHART = "the ladder so far: a step of each strategy on one time axis, and the memory of every device"


def operation(rank, kind, start, end):
    return {"rank": rank, "lane": "compute", "kind": kind, "start": start, "end": end}


def all_reduce(rank, group, start, moves, end):
    return operation(rank, "A", start, end) | {"lane": "comm", "moves": moves, "group": group}


def row(rung, devices, step, timeline, **more):
    parts = {
        "weights": 10 * MIB,
        "gradients": 10 * MIB,
        "optimizer": 20 * MIB,
        "activations": 60 * MIB // devices,
    }
    facts = {
        "rung": rung,
        "devices": devices,
        "step_seconds": step,
        "timeline": timeline,
        "memory": [parts] * devices,
    }
    facts |= {"strategy": rung, "note": None, "single_seconds": step, "at_bound": False}
    for name, interval in (("speedup", "speedup"), ("bound", "bound"), ("fraction_of_bound", "fraction")):
        facts |= {name: 1.0, f"{interval}_interval": [1.0, 1.0]}
    return facts | {"step_seconds_interval": [0.9 * step, 1.1 * step]} | more


def single(step):
    lane = [operation(0, "F", 0, 0.3 * step), operation(0, "B", 0.3 * step, 0.9 * step)]
    return row("single", 1, step, [*lane, operation(0, "O", 0.9 * step, step)])


def ddp():
    computed = ("F", 0, 0.04), ("B", 0.04, 0.1), ("O", 0.115, 0.12)
    timeline = [operation(rank, *times) for rank in (0, 1) for times in computed]
    timeline += [all_reduce(rank, "g0", 0.06, 0.06, 0.08) for rank in (0, 1)]
    timeline += [all_reduce(rank, "g1", start, 0.105, 0.115) for rank, start in enumerate((0.1, 0.105))]
    found = {"speedup": 1.6, "bound": 1.9, "fraction_of_bound": 0.85, "single_seconds": 0.19}
    intervals = {
        "speedup_interval": [1.55, 1.62],
        "bound_interval": [1.85, 1.92],
        "fraction_interval": [0.82, 0.88],
    }
    return row("ddp", 2, 0.06, timeline, **found, **intervals)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An empty project, and a function that writes the rows of a job that timed a strategy."""
    monkeypatch.setattr(paths, "root", lambda: tmp_path)

    def write(name, rows):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"rows": rows}))

    return write


@pytest.fixture
def climbed(runs):
    """The single device and DDP timed."""
    runs("speed_single", [single(0.2)])
    runs("speed_ddp", [single(0.25), ddp()])


def test_the_table_has_a_row_for_each_strategy_that_was_timed_in_the_order_of_the_ladder(climbed, runs):
    shown = ladder.ladder_table()
    lines = repr(shown).splitlines()
    assert [" ".join(line.split()) for line in lines[:3]] == [
        "strategy devices step (ms) speed-up upper bound fraction of bound MiB per device",
        "single 1 200 - - - 100",
        "ddp 2 190 → 60 1.60 (1.55 to 1.62) 1.90 0.85 (0.82 to 0.88) 70, 70",
    ]
    missing = "Not timed yet, by measure(NAME): data_parallel, model_parallel, pipeline, "
    assert lines[3].startswith(missing)
    html = shown.data["text/html"]
    assert html.count("<tr>") == 3 and f"<p>{missing}" in html
    runs("speed_fsdp", [single(0.2), ddp() | {"rung": "fsdp", "bound": 1.7}])
    # one quantity, measured in two jobs
    assert "1.70 to 1.90" in repr(ladder.ladder_table()).splitlines()[2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "0.85 (0.82 to 0.88); slower than the bound."),
        ({"fraction_of_bound": 0.98, "fraction_interval": [0.95, 1.01], "at_bound": True},
         "0.98 (0.95 to 1.01); no shortfall from the bound can be reported."),
        ({"speedup_interval": None, "bound_interval": None, "fraction_interval": None},
         "0.85; fewer than 6 rounds, so no interval and no verdict."),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_interval_of_the_fraction_and_names_no_cause(changes, said):
    found = ladder.in_words(ddp() | changes)
    assert found.startswith("ddp: speed-up 1.60") and found.endswith(f"fraction of the upper bound {said}")


def test_the_single_device_has_the_interval_of_its_step():
    assert ladder.in_words(single(0.2)) == "single: 200 ms per step (95 % interval 180 to 220)."
    assert ladder.in_words(single(0.2) | {"step_seconds_interval": None}) == "single: 200 ms per step."


def test_a_stand_in_by_threads_is_named_so_and_explained(runs):
    threads = ddp() | {"rung": "data_parallel", "strategy": "data_parallel (threads)", "note": THREADS}
    runs("speed_data_parallel", [single(0.25), threads])
    lines = repr(ladder.ladder_table()).splitlines()
    assert lines[2].startswith("data_parallel (threads)") and lines[-1] == THREADS
    assert ladder.headline(threads).startswith("data_parallel (threads), 2 devices: 190 → 60 ms per step")


def test_rows_of_an_earlier_version_are_not_shown_and_to_be_measured_again(climbed, runs):
    old = {"rung": "fsdp", "devices": 2, "speedup": 1.6, "speedup_quartiles": [1.5, 1.7]}
    runs("speed_fsdp", [single(0.25), old])
    assert ", fsdp, " in repr(ladder.ladder_table()) and len(ladder.ladder_chart().figure.axes) == 4
    with pytest.raises(
        UserError, match="runs/speed_fsdp was measured by an earlier version.*resubmit=True"
    ):
        ladder.in_words(old)


def test_the_chart_has_every_timeline_on_one_axis_and_a_bar_for_each_device(climbed, runs):
    shown = ladder.ladder_chart()
    times, memories = shown.figure.axes[::2], shown.figure.axes[1::2]
    assert [axes.get_title(loc="left") for axes in times] == [
        "single, 1 device: 200 ms per step",
        "ddp, 2 devices: 190 → 60 ms per step, speed-up 1.60 (0.85 of the upper bound)",
    ]
    assert {axes.get_xlim() for axes in times} == {(0, 200)}
    assert [len(axes.get_yticklabels()) for axes in times] == [1, 2]
    assert [[text.get_text() for text in axes.texts] for axes in memories] == [["100"], ["70", "70"]]
    boxes = [path.get_extents() for part in times[1].collections for path in part.get_paths()]
    spans = {(round(box.x0), round(box.x1)) for box in boxes}
    assert spans == {(0, 20), (20, 50), (30, 40), (50, 52), (52, 58), (58, 60)}  # ms; not 120, as profiled
    legend = {text.get_text() for text in shown.figure.legends[0].get_texts()}
    assert (
        legend >= {"forward", "backward", "optimizer", "all-reduce", "memory: weights"}
        and "idle" not in legend
    )
    assert legend >= {"exposed communication", "waits for a rank"}
    alt = shown.metadata["image/png"]["alt"]
    assert alt.startswith("single, 1 device: 200 ms per step, peak memory (MiB) 100; ddp")
    assert ", exposed communication 5 ms, waits for a rank 1 ms, peak memory (MiB) 70, 70" in alt
    assert repr(shown) == CHART


def test_without_runs_the_next_notebook_is_named(runs):
    for function in (ladder.ladder_table, ladder.ladder_chart):
        with pytest.raises(UserError, match="nothing was timed yet; call measure"):
            function()


@pytest.mark.nightly
def test_a_rung_is_measured_beside_the_single_device_and_shown(tmp_path, monkeypatch):
    """In two processes, for six rounds."""
    out = tmp_path / "runs/speed_ddp"
    run_worlds(tmp_path, [[2, lab.__file__, str(out), "ddp", "6"]])
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    summary = json.loads((out / "summary.json").read_text())
    first, second = summary["rows"]
    assert (first["rung"], first["devices"], second["rung"], second["devices"]) == ("single", 1, "ddp", 2)
    (alone,), of_ddp = first["memory"], second["memory"]
    assert len(of_ddp) == 2 and alone["gradients"] < 0.01 * alone["weights"]
    for peak in of_ddp:  # the buckets keep all gradients
        assert (
            peak["gradients"] == peak["weights"] == alone["weights"]
            and peak["activations"] < alone["activations"]
        )
    seconds = summary["seconds"]
    others = seconds["ddp"]
    assert from_row(second, "speedup") == ratio(seconds["single"], others)
    assert from_row(second, "fraction_of_bound") == ratio(seconds["independent"], others)
    assert second["max_relative_gradient_error"] < 1e-4
    assert {o["kind"] for o in first["timeline"]} == {"F", "B", "O"}
    for rank in (0, 1):
        lane = [o for o in second["timeline"] if o["rank"] == rank]
        backward, reductions = ([o for o in lane if o["kind"] == kind] for kind in "BA")
        assert len(reductions) >= 2  # buckets; the first one is reduced while the backward pass continues
        assert backward[0]["start"] < reductions[0]["start"] < backward[-1]["end"] < reductions[-1]["end"]
        # no update before its gradient
        assert reductions[-1]["moves"] <= lane[-1]["start"] and lane[-1]["kind"] == "O"
    assert repr(ladder.ladder_table()).splitlines()[2].startswith("ddp")
    assert len(ladder.ladder_chart().figure.axes) == 4
