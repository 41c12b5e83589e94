"""The record of a GPU: all of it in small on a CPU core; crashes, limits and kills leave what was found before."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from gpu import page
from gpu.record import END_OF_TESTS, SCRIPTS, STRATEGIES, list_parts, passed_before
from worker_jobs import until

from mpdemo.paths import root

RECORD = str(root() / "tests/gpu/record.py")
SAY = "import json, sys; open(sys.argv[1], 'a').write(json.dumps({'said': %r}) + '\\n')"
ORPHAN = ["sleep", f"987.{os.getpid()}"]  # it has left its part's session, as the processes of torchrun do
HANG = f"; import subprocess, time; subprocess.Popen({ORPHAN}, start_new_session=True); time.sleep(987)"
PROGRAM = """
import sys
from pathlib import Path

sys.path.insert(0, "tests/gpu")
from record import Part, environment, record

out, *parts = sys.argv[1:]
parts = [Part(str(number), 4, ["-c", code, "{rows}"]) for number, code in enumerate(parts)]
sys.exit(not record(parts, Path(out), {"device": "one CPU core"}, environment(True)))
"""


def started(out, *codes):
    """Start recording parts, each a line of Python."""
    command = [sys.executable, "-c", PROGRAM, str(out), *codes]
    return subprocess.Popen(command, cwd=root(), stdout=subprocess.PIPE, text=True)


def sleepers() -> list:
    """The orphans of parts that are still running."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ORPHAN]


def read(folder) -> list:
    """The parts of the record in a folder."""
    return json.loads((folder / "record.json").read_text())["parts"]


@pytest.fixture(scope="module")
def small(run_once, tmp_path_factory):
    """The record of everything in small, and the folder with what its parts wrote."""
    folder = tmp_path_factory.mktemp("small")
    options = [
        "--on",
        "cpu",
        "--missing",
        "--out",
        str(folder / "record.json"),
        "--commit",
        "abc",
        "--seconds",
        "1500",
    ]
    done = run_once(RECORD, *options, timeout=1550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(folder / "record.json") in done.stdout
    return json.loads((folder / "record.json").read_text()) | {"folder": folder / "record-parts"}


def in_small(test):
    """Run a test at night, and give it the time in which everything is recorded."""
    return pytest.mark.nightly(pytest.mark.timeout(1600)(test))


@in_small
def test_everything_runs_in_small_on_a_cpu(small):
    facts = (
        "device",
        "processor",
        "torch",
        "cuda",
        "cudnn",
        "python",
        "date",
        "commit",
        "command",
        "seconds",
    )
    assert all(name in small for name in facts) and small["finished"] and small["commit"] == "abc"
    parts = {part["part"]: part for part in small["parts"]}
    order = ["tests", "memory", "train_single", "train_ddp", "train_fsdp", "gpt", "resnet"]
    order += [
        "efficiency",
        "traces",
        "data_parallel",
        "train_gpt",
        "experts",
        "player",
        "killed",
        "predicted",
    ]
    assert list(parts) == [*order, *(f"two_{name}" for name in (*SCRIPTS, *STRATEGIES))]
    assert {part["outcome"] for part in parts.values()} == {"passed"}
    outcomes = {row["outcome"]: row for row in parts["tests"]["rows"]}
    assert set(outcomes) == {"passed", "skipped"} and "needs 4 GPUs, 2 here" in outcomes["skipped"]["why"]
    outputs = ("\n".join(parts[name]["output"]) for name in ("train_single", "train_ddp"))
    single, ddp = (re.findall(r"epoch \d: loss [\d.]+, accuracy [\d.]+", text) for text in outputs)
    assert single == ddp and len(single) == 5


@in_small
def test_the_parts_of_a_second_record_have_what_is_read_from_them(small):
    rows = {part["part"]: part["rows"] for part in small["parts"]}
    classes = {row["class"].split(",")[0] for row in rows["efficiency"]}
    assert {
        "launch",
        "product",
        "attention",
        "AdamW",
        "RMS norm",
        "cross entropy",
        "convolution",
    } <= classes
    assert all(row["spread"][0] <= row["fraction"] <= row["spread"][1] for row in rows["efficiency"])
    assert [row["case"] for row in rows["traces"]] == [
        "resnet18-channels_last",
        "resnet18",
        "gpt",
        "gpt-compile",
    ]
    assert all(row["kept"] and (small["folder"] / row["trace"]).exists() for row in rows["traces"])
    assert len(rows["data_parallel"]) == 2 and all(row["equal"] for row in rows["data_parallel"])
    assert len(rows["killed"]) == 3 and {row["outcome"] for row in rows["killed"]} == {"passed"}
    # microbatches, each forward and backward through each block
    for name, times in (("gpt", 1), ("two_stages", 4)):
        step = json.loads((small["folder"] / f"player-{name}.json").read_text())
        marks = [mark for mark, _ in step["marks"]]
        assert all(marks.count(f"{kind}|{k}") == times for kind in "FB" for k in range(step["layers"] + 1))
        assert marks.index("B|4") > marks.index("F|4") and marks[-1] == "Optimizer.step#AdamW.step"
        assert {mark for _, _, mark, _, _ in step["kernels"]} == set(range(len(marks)))
        # the last change at each address
        gained = {address: bytes_ for _, address, bytes_ in step["memory"]}
        assert sum(gained[address] for address in step["gradients"]) >= step["held"]["weights"]


@in_small
@pytest.mark.parametrize(("name", "unit", "options"), [
    ("gpt", "tokens", ["checkpointing", "compile", "fused"]),
    ("resnet", "images", ["channels_last", "compile", "fused"]),
])  # fmt: skip
def test_each_option_is_added_to_those_before_and_timed(small, name, unit, options):
    rows = next(part["rows"] for part in small["parts"] if part["part"] == name)
    assert [row["options"] for row in rows] == [options[:count] for count in range(4)]
    for row in rows:
        per_batch = row["batch"] * row.get("length", 1)
        assert row[f"{unit}_per_second"] == pytest.approx(per_batch / sorted(row["step_seconds"])[1])
        assert 0 < row["mfu"] < 1 and row["flops_per_item"] > 0 and 0 < row["loss"] < 10
    if name == "gpt":  # as in PaLM's appendix B: 6 for each parameter, and attention
        formula = 64 * (6 * rows[0]["parameters"] + 12 * 4 * 128 * 64)
        assert rows[0]["flops_per_item"] == pytest.approx(formula, rel=0.02)


@in_small
def test_what_was_planned_stands_beside_what_was_measured(small):
    rows = next(part["rows"] for part in small["parts"] if part["part"] == "predicted")
    assert [row["model"] for row in rows] == 2 * ["gpt"] + 2 * ["resnet18"]
    eager, checkpointed = rows[:2]
    assert 0 < checkpointed["predicted_gib"] < eager["predicted_gib"] and eager["measured_seconds"] > 0


def test_what_is_missing_takes_eight_minutes_and_is_what_no_such_gpu_has_passed():
    before = passed_before("NVIDIA H100 PCIe")
    limits = [part.limit for part in list_parts(False, Path(), 4, gpus=1) if part.name not in before]
    assert {"tests", "gpt"} <= before and "efficiency of the trace" in before and sum(limits) <= 480
    assert passed_before("NVIDIA B200") == set()


@pytest.mark.nightly
def test_the_fractions_of_the_roof_are_those_of_the_trace(run_once):
    files = ["2026-11-27-h100-trace.json.gz", "2026-11-27-4-h100.json"]
    files = [str(root() / "notebooks/gpu" / name) for name in files]
    done = run_once("tests/gpu/efficiency.py", "--from-trace", *files, timeout=300)
    saved = root() / "notebooks/gpu/2026-11-27-4-h100-efficiency-of-its-trace.json"
    assert done.stdout == saved.read_text(), done.stderr


def test_the_pages_say_what_the_newest_record_shows():
    assert all(path.read_text() == text for path, text in page.pages().items()), (
        "run python tests/gpu/page.py"
    )


def test_a_page_tells_what_failed_what_was_measured_and_what_only_an_older_record_has(tmp_path):
    tests = [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed", "why": "x\nCUDA error"}]
    tests += [{"test": "c", "outcome": "skipped", "why": "needs 2 GPUs, 1 here"}]
    step = {"model": "gpt", "batch": 8, "tokens_per_second": 1000.0, "mfu": 0.41, "peak_memory_gib": 70.0}
    step |= {"median_seconds": 2.0, "interval_seconds": [1.6, 2.5], "options": ["compile"]}
    of_two = {"rung": "ddp", "speedup": 1.9, "speedup_interval": [1.8, 1.95], "bound": 2.0}
    of_gpt = [step, {**step, "options": ["fp8"], "error": "out of memory"}]
    of_roof = [{"class": f"product, {n}", "fraction": n / 10} for n in (5, 8)] + [
        {"class": "copy", "error": "memory"}
    ]
    named = {"tests": tests, "gpt": of_gpt, "efficiency": of_roof, "two_ddp": [of_two]}
    parts = [{"part": name, "outcome": "passed", "rows": rows} for name, rows in named.items()]
    record = {
        "device": "NVIDIA H100",
        "torch": "2.11",
        "date": "2026-12-01 10:00:00",
        "driver": "580",
        "parts": parts,
    }
    removed = [{"test": "c", "outcome": "passed"}, {"test": "test_that_is_gone", "outcome": "failed"}]
    named = {"gpt": [{**step, "options": ["fused"]}], "tests": removed}
    named |= {name: [] for name in ("train_ddp", "train_gone", "notebook 04")}
    older = [{"part": name, "outcome": "passed", "rows": rows} for name, rows in named.items()]
    for name, content in [("2026-11-30-h100", record | {"parts": older}), ("2026-12-01-h100", record)]:
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    record = page.newest(tmp_path)
    text = page.page(record)
    assert "2 passed, 1 failed, 0 skipped" in text and "- failed, CUDA error: `b`" in text
    of_older = "[train_ddp](gpu/2026-11-30-h100.json)"
    of_new = [f"[{name}](gpu/2026-12-01-h100.json)" for name in ("gpt", "efficiency", "two_ddp")]
    assert f"| {of_new[0]}, {of_older}, {of_new[1]}, {of_new[2]} | passed |  |" in text
    assert "Fraction of the plan's roof: product 0.50 to 0.80.\n" in text
    assert text.count("(gpu/2026-12-01-h100.json)") == 4 and "| fused | 1,000" in text
    assert (
        "| compile | 1,000 (800 to 1,250) | 41.0% | 70.0 GiB |" in text
        and "| fp8 | out of memory |" in text
    )
    assert "speed-up 1.90 (1.80 to 1.95), upper bound 2.00" in text
    assert "`train_gpt.py`" in text and "`train_ddp.py`" not in text and "`gpt.py`" not in text
    assert "train_gone" not in text and "notebook 04" not in text
    said, record["parts"] = page.status(record), record["parts"][:-1]
    assert all(
        words in said
        for words in ("has run 1 of the course", "3 of the 3 GPU tests; 0 were", "On two, 1 of 1")
    )
    assert page.status(record).endswith(
        "**Nothing has run on two GPUs.**"
    ) and "anything on two" in page.page(record)


def test_a_crash_and_a_part_over_its_limit_spoil_no_other(tmp_path):
    crash = "print('before'); raise RuntimeError('CUDA error: an illegal memory access')"
    process = started(tmp_path / "record.json", SAY % 1, crash, SAY % 2 + HANG, SAY % 3)
    assert process.wait(60) == 1 and not sleepers()
    parts = read(tmp_path)
    assert [part["outcome"] for part in parts] == ["passed", "failed", "timed out", "passed"]
    assert [part["rows"] for part in parts] == [[{"said": 1}], [], [{"said": 2}], [{"said": 3}]]
    assert parts[1]["output"][-1] == "RuntimeError: CUDA error: an illegal memory access"
    assert parts[1]["output"][0] == "before" and parts[1]["exit_status"] == 1


TERMINATED = pytest.param(signal.SIGTERM, "interrupted", marks=pytest.mark.nightly)


@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGKILL, "running"), TERMINATED])
def test_a_kill_in_the_middle_loses_nothing(tmp_path, number, outcome):
    process = started(
        tmp_path / "record.json", SAY % 1, SAY % 2 + "; import time; time.sleep(987)", SAY % 3
    )
    until(lambda: (tmp_path / "record.json").exists() and read(tmp_path)[1].get("rows") == [{"said": 2}])
    part = psutil.Process(process.pid).children()[0]
    os.kill(process.pid, number)
    process.wait(20)
    parts = read(tmp_path)
    assert [part["outcome"] for part in parts] == ["passed", outcome, "not started"]
    assert parts[0]["rows"] == [{"said": 1}] and parts[1]["rows"] == [{"said": 2}]
    part.wait(20)  # it ends with the program


@pytest.mark.nightly
@pytest.mark.parametrize(("row", "end", "outcome"), [
    ("failed", '{"test": "b", "outc', "failed"),
    ("passed", '{"test": "b", "outc', "cut"),
    ("passed", END_OF_TESTS, "passed"),
])  # fmt: skip
def test_tests_that_ran_just_before_are_taken_over(run_once, tmp_path, row, end, outcome):
    row = {"test": "a", "outcome": row, "seconds": 1.0, "why": "AssertionError"}
    (tmp_path / "gpu.jsonl").write_text(json.dumps(row) + "\n" + end)
    done = run_once(
        RECORD, "--on", "cpu", "--only", "tests", "--out", str(tmp_path / "record.json"), timeout=60
    )
    assert done.returncode == (outcome != "passed")
    (part,) = read(tmp_path)
    assert part["outcome"] == outcome and part["rows"] == [row] and part["taken_from"] == "gpu.jsonl"


@pytest.mark.parametrize(("options", "line"), [
    (["--on", "gpu"], "--on gpu: nvidia-smi names no GPU here; --on cpu runs everything in small on a CPU core"),
    (["--on", "cpu", "--only", "all"], "invalid choice: 'all'"),
    (["--on", "cpu"], "record.json exists; name a new file, or remove what is there"),
])  # fmt: skip
def test_bad_input_is_one_line(run_once, tmp_path, options, line):
    (tmp_path / "record.json").touch()
    done = run_once(RECORD, *options, "--out", str(tmp_path / "record.json"), timeout=60, PATH="/none")
    assert done.returncode == 2 and line in done.stderr and len(done.stderr.splitlines()) == 1
