"""What a program does when a signal comes, watched in a notebook: here, under Slurm, and with stand-ins for it."""

import argparse
import re

import psutil
import pytest

from mpdemo.errors import UserError
from mpdemo.labs import watch

LISTENS = """
import signal, time
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print(signal.Signals(number).name))
print("listening")
while True:
    time.sleep(0.01)
"""
# Counts to 3; warned, it goes back into the queue as long as it has not got there.
COUNTS = """#!/bin/bash
#SBATCH --time=00:05:00
#SBATCH --requeue --open-mode=append
echo "begins after $(cat count 2>/dev/null)"
trap 'echo warned; warned=yes; kill "$step"' USR1
srun --label sleep 60 &
step=$!
[ -s count ] || wait "$step"
echo 3 > count
[ -z "$warned" ] || scontrol requeue "$SLURM_JOB_ID"
"""


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Watch in an empty project; return what was said, without the seconds."""
    monkeypatch.setenv("MPDEMO_ROOT", str(tmp_path))

    def run(line, save=None):
        watch.watch(line, save)
        return [text for _, text in watch.SAID]

    return run


def test_a_program_gets_its_signals_in_their_order_and_the_clock_starts_with_its_first_line(said, capsys):
    assert said("USR1@0.5 TERM@1 KILL@1.5 python listens.py", LISTENS) == [
        *("listening", "→ SIGUSR1 to python alone", "SIGUSR1", "→ SIGTERM to python alone", "SIGTERM"),
        *("→ SIGKILL to python alone", "python was ended by SIGKILL"),
    ]
    assert watch.seconds("listening", "→ SIGTERM") == [0.0, pytest.approx(1, abs=0.2)]
    assert re.match(r" 0\.0 s  listening\n 0\.[5-8] s  → SIGUSR1", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("who", "whom", "left"), [("first ", "bash alone", True), ("", "all 2 processes", False)]
)
def test_the_first_process_alone_or_all_get_it_and_orphans_are_ended(said, who, whom, left):
    lines = said(f"{who}USR1@0.3 bash parent.sh", "echo $$\nsleep 61.53 &\nwait")
    assert lines[1:3] == [f"→ SIGUSR1 to {whom}", "bash was ended by SIGUSR1"]
    assert lines[3:] == ["left over: 1 process; watch ends it"] * left
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "61.53"]]


@pytest.mark.parametrize("place", ["cluster", "no_slurm no_cluster"])  # there are stand-ins
def test_a_job_is_warned_goes_back_into_the_queue_and_starts_again(said, place, request):
    for fixture in place.split():
        request.getfixturevalue(fixture)
    text = "\n".join(said("first USR1@0.5 sbatch counts.sbatch", COUNTS))
    assert re.match(
        r"begins after ?\n(.*\n)*→ .*\n(.*\n)*warned\n(.*\n)*begins after 3\n(.*\n)*the job is COMPLETED",
        text,
    )
    # a cluster's may be seen after the first line of the second beginning
    assert text.count("the job is PENDING") == 1


def test_a_job_that_slurm_calls_running_after_its_first_line_is_not_said_to_run(
    tmp_path, monkeypatch, capsys
):
    states = iter(("PENDING", "RUNNING", "TIMEOUT"))
    run = watch._Run(["sbatch", "a.sbatch"], [], set(), {})
    run.log = tmp_path / "log"
    run.log.write_text("listening\n")
    monkeypatch.setattr(watch, "ASK", -1)
    answer = lambda *_, **__: argparse.Namespace(stdout=f"JobState={next(states)} Restarts=0")  # noqa: E731
    monkeypatch.setattr(watch.subprocess, "run", answer)
    run.wait("1", {})
    assert re.findall("  (.*)", capsys.readouterr().out)[1:] == ["the job is TIMEOUT"]


def test_of_torchrun_and_tracebacks_only_what_tells_something_is_shown():
    begin = "W1129 10:00:00.123000 77 torch/distributed/elastic/agent/server/api.py:725] "
    log = {
        f"{begin}Received Signals.SIGUSR1 death signal, shutting down workers": (
            "torchrun: received the signal, shutting down workers"
        ),
        f"{begin}Unable to shutdown process 78 via Signals.SIGUSR1, forcefully exiting via 9": (
            "torchrun: Unable to shutdown a rank with SIGUSR1, SIGKILL"
        ),
        "Traceback (most recent call last):": "",
        '  File "train.py", line 3': "",
        "RuntimeError: worker (pid 77) is killed": "RuntimeError: worker (pid ...) is killed",
        "slurmstepd-node1: error: *** STEP 3.0 ON node1 CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***": (
            "slurm: STEP CANCELLED DUE TO TIME LIMIT"
        ),
    }
    assert [watch._kept(line) for line in log] == [*log.values()]


@pytest.mark.parametrize(
    ("line", "save", "what"),
    [
        ("USR3@1 python a.py", None, "'USR3@1': there is no such signal"),
        ("soon python a.py", None, "'soon' is not allowed; words of watch: all, first"),
        ("USR1@1", None, "nothing to start"),
        ("python -c pass", "print(1)", "names no file for the cell"),
    ],
)
def test_a_line_that_says_nothing_sensible_is_refused_in_a_sentence(said, line, save, what):
    with pytest.raises(UserError, match=re.escape(what)):
        said(line, save)
