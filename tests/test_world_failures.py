"""A rank dies: all others end soon, the message names the rank and its error, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from worker_jobs import until

from mpdemo.paths import root

SOON = 20  # seconds from the failure to the end of everything, on a busy machine
DDP = ["--rung", "ddp", "--model", "toy"]
PIPELINE = ["--rung", "pipeline", "--model", "toy", "--microbatches", "4"]


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
    environment = {**os.environ, "PYTHONPATH": str(root()), "TMPDIR": str(out.parent)}
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
    words = ["tests/programs/failing.py", str(rank), how, *rung, "--batch-size", "24", "--log-every", "1"]
    words += ["--processes", str(processes)]
    with running(words, out) as child:
        until(lambda: steps_done(out) or child.poll() is not None, 60)
        begun = time.monotonic()
        stderr = child.communicate(timeout=60)[1]
        assert time.monotonic() - begun < SOON
        left = processes_of(str(out))
    assert child.returncode == 1, stderr
    assert not left
    last = stderr.splitlines()[-1]
    why = "failed: ValueError: the digits are upside down" if how == "raise" else "ended with exit status 137"
    assert last == f"mpdemo: rank {rank} of {processes} {why}"
    assert stderr.count("Traceback") == (1 if how == "raise" else 0), stderr  # none of who lost it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_parent_is_ended(number, tmp_path):
    """Ctrl-C or a kill of the parent leaves no rank behind, and no traceback."""
    out = tmp_path / "run"
    words = ["-m", "mpdemo", "train", *DDP, "--epochs", "10000", "--processes", "2", "--log-every", "1"]
    with running(words, out) as child:
        until(lambda: steps_done(out), 60)
        child.send_signal(number)
        stderr = child.communicate(timeout=SOON)[1]
        until(lambda: not processes_of(str(out)), 2)
    assert child.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in stderr and "death signal" not in stderr
    if number == signal.SIGINT:
        assert stderr.endswith("mpdemo: SIGINT: all 2 processes ended\n")  # the progress bar may stand before it


@pytest.mark.parametrize("moment", ["its ranks begin", pytest.param("they train", marks=pytest.mark.nightly)])
def test_a_torchrun_that_is_killed_leaves_no_rank_behind(moment, tmp_path):
    """Started by hand, it has no supervisor; by itself it would leave them."""
    out = tmp_path / "run"
    words = ["-m", "mpdemo", "train", *DDP, "--epochs", "10000", "--log-every", "1"]
    with running(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words], out) as child:
        ready = {"its ranks begin": lambda: len(processes_of(str(out))) == 3, "they train": lambda: steps_done(out)}
        until(ready[moment], 60)
        child.kill()
        child.communicate(timeout=SOON)
        until(lambda: not processes_of(str(out)), 5)
