"""The record of a GPU: all of it in small on a CPU core; crashes, limits and kills leave what was found before."""

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
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
    """The record of everything in small."""
    folder = tmp_path_factory.mktemp("small")
    options = ["--on", "cpu", "--out", str(folder / "record.json"), "--commit", "abc", "--seconds", "600"]
    done = run_once(RECORD, *options, timeout=700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(folder / "record.json") in done.stdout
    return json.loads((folder / "record.json").read_text())


@pytest.mark.nightly
def test_everything_runs_in_small_on_a_cpu(small):
    facts = ("device", "processor", "torch", "cuda", "cudnn", "python", "date", "commit", "command", "seconds")
    assert all(name in small for name in facts) and small["finished"] and small["commit"] == "abc"
    parts = {part["part"]: part for part in small["parts"]}
    assert list(parts) == ["tests", "train_single", "train_ddp", "train_fsdp", "gpt", "resnet", "two_stages", "trace"]
    assert {part["outcome"] for part in parts.values()} == {"passed"}
    outcomes = {row["outcome"]: row for row in parts["tests"]["rows"]}
    assert set(outcomes) == {"passed", "skipped"} and "needs 4 GPUs, 2 here" in outcomes["skipped"]["why"]
    outputs = ("\n".join(parts[name]["output"]) for name in ("train_single", "train_ddp"))
    single, ddp = (re.findall(r"epoch \d: loss [\d.]+, accuracy [\d.]+", text) for text in outputs)
    assert single == ddp and len(single) == 5


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "unit", "options"), [
    ("gpt", "tokens", ["compile", "checkpointing", "fused"]),
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
    process = started(tmp_path / "record.json", SAY % 1, SAY % 2 + "; import time; time.sleep(987)", SAY % 3)
    until(lambda: (tmp_path / "record.json").exists() and read(tmp_path)[1].get("rows") == [{"said": 2}])
    part = psutil.Process(process.pid).children()[0]
    os.kill(process.pid, number)
    process.wait(20)
    parts = read(tmp_path)
    assert [part["outcome"] for part in parts] == ["passed", outcome, "not started"]
    assert parts[0]["rows"] == [{"said": 1}] and parts[1]["rows"] == [{"said": 2}]
    part.wait(20)  # it ends with the program


@pytest.mark.nightly
def test_tests_that_ran_just_before_are_taken_over(run_once, tmp_path):
    row = {"test": "a", "outcome": "failed", "seconds": 1.0, "why": "AssertionError"}
    (tmp_path / "gpu.jsonl").write_text(json.dumps(row) + '\n{"test": "b", "outc')
    done = run_once(RECORD, "--on", "cpu", "--only", "tests", "--out", str(tmp_path / "record.json"), timeout=60)
    assert done.returncode == 1
    (part,) = read(tmp_path)
    assert part["outcome"] == "failed" and part["rows"] == [row] and part["taken_from"] == "gpu.jsonl"


@pytest.mark.parametrize(("options", "line"), [
    (["--on", "gpu"], "--on gpu: nvidia-smi names no GPU here; --on cpu runs everything in small on a CPU core"),
    (["--on", "cpu", "--only", "all"], "invalid choice: 'all'"),
    (["--on", "cpu"], "record.json exists; name a new file, or remove what is there"),
])  # fmt: skip
def test_bad_input_is_one_line(run_once, tmp_path, options, line):
    (tmp_path / "record.json").touch()
    done = run_once(RECORD, *options, "--out", str(tmp_path / "record.json"), timeout=60, PATH="/none")
    assert done.returncode == 2 and line in done.stderr and len(done.stderr.splitlines()) == 1
