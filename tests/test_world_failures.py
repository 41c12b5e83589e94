"""A rank dies: all others end soon, the message names the rank and its error, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from project import python_path
from worker_jobs import until

from mpdemo.paths import root

SOON = 20  # seconds from the failure to the end of everything, beside the time that the start took: on a busy machine
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TOY = ["--model", "toy", "--batch-size", "24", "--log-every", "1", "--epochs", "10000"]
DDP, PIPELINE = ["ddp"], ["pipeline", "--schedule", "1F1B", "--microbatches", "4"]


def processes_of(mark) -> list[int]:
    """Processes whose command line holds `mark`."""
    found = psutil.process_iter(["cmdline"])
    return [each.pid for each in found if mark in str(each.info["cmdline"]) and each.pid != os.getpid()]


def steps_done(out) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count('"step"') if path.exists() else 0


@contextmanager
def running(words, out):
    """Start a program of which only stderr is kept; what one that is killed cannot remove stays beside its folder."""
    environment = {**os.environ, "PYTHONPATH": python_path(root()), "TMPDIR": str(out.parent)}
    command = [sys.executable, *words, "--out", str(out)]
    child = subprocess.Popen(command, cwd=root(), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        for pid in processes_of(str(out)):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("rung", "how", "rank", "processes"), [
    pytest.param(DDP, "raise", 1, 2, id="ddp raise", marks=pytest.mark.nightly),
    pytest.param(DDP, "kill", 0, 2, id="ddp kill"),
    pytest.param(PIPELINE, "kill", 1, 2, id="pipeline kill", marks=pytest.mark.nightly),
    pytest.param(PIPELINE, "raise", 0, 3, id="pipeline raise"),
])  # fmt: skip
def test_one_rank_fails(rung, how, rank, processes, tmp_path):
    """In the pipeline of three the last stage never talks to the first, which dies; it ends as well."""
    out = tmp_path / "run"
    words = [*TORCHRUN, str(processes), "tests/programs/failing.py", str(rank), how, *rung, *TOY]
    with running(words, out) as child:
        begun = time.monotonic()
        until(lambda: steps_done(out) or child.poll() is not None)
        stderr = child.communicate(timeout=SOON + time.monotonic() - begun)[1]
        left = processes_of(str(out))
    assert child.returncode == 1, stderr
    assert not left
    first = stderr.partition("Root Cause")[2]  # torchrun's account of who failed first
    assert f"rank      : {rank} (" in first, stderr
    assert ("the digits are upside down" in stderr) == (how == "raise")
    # torchrun's own, and none of who lost the rank
    assert stderr.count("Traceback") == 1 + (how == "raise"), stderr


@pytest.mark.parametrize(("number", "moment"), [
    (signal.SIGINT, "they train"),
    (signal.SIGKILL, "its ranks begin"),
    pytest.param(signal.SIGKILL, "they train", marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_torchrun_that_is_ended_leaves_no_rank_behind(number, moment, tmp_path):
    """By itself a torchrun that is killed would leave them. Ctrl-C costs no traceback of theirs."""
    out = tmp_path / "run"
    with running([*TORCHRUN, "2", "-m", "mpdemo.rungs.ddp", *TOY], out) as child:
        ready = {
            "its ranks begin": lambda: len(processes_of(str(out))) == 3,
            "they train": lambda: steps_done(out),
        }
        begun = time.monotonic()
        until(ready[moment])
        child.send_signal(number)
        stderr = child.communicate(timeout=SOON + time.monotonic() - begun)[1]
        until(lambda: not processes_of(str(out)), 5)
    assert "Error" not in stderr.replace("SignalException", "")
    assert "KeyboardInterrupt" not in stderr
