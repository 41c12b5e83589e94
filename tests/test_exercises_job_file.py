"""A reader's batch script is tried on a real Slurm that lives for one job; where none can start, its text is read."""

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from test_exercises import solved_cells
from worker_jobs import stand_in

from mpdemo.notebook import check
from mpdemo.notebook.check import verdict
from mpdemo.paths import root

RIGHT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-task=1
#SBATCH --time=00:05:00
#SBATCH --output=work/slurm-%j.out
srun --label python -u -m mpdemo.labs.hello
"""


@pytest.fixture
def job_files():
    """The module of the checks that tries batch scripts."""
    check._answers("11")
    return sys.modules["checks.job_files"]


def written(folder, text) -> Path:
    """Return a file with a reader's answer."""
    path = folder / "answer.sbatch"
    path.write_text(text)
    return path


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files, short enough for munge's socket."""
    with tempfile.TemporaryDirectory(prefix="mp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def living(folder) -> list:
    """Return the processes of the clusters in a folder: each has the path of its configuration."""
    every = psutil.process_iter(["name", "environ"])
    return [
        p.info["name"]
        for p in every
        if (p.info["environ"] or {}).get("SLURM_CONF", "").startswith(str(folder))
    ]


def test_a_job_that_does_not_end_is_ended(slurm_programs, temporary, tmp_path, monkeypatch, job_files):
    monkeypatch.setattr(job_files, "SECONDS", 3.0)
    with pytest.raises(AssertionError, match="After 3 s the job is still running"):
        job_files.printed_by_job(written(tmp_path, RIGHT + "sleep 60\n"))
    assert not living(temporary)
    assert not list(temporary.iterdir())


def test_without_a_slurm_the_text_is_read(tmp_path, monkeypatch, job_files):
    monkeypatch.setattr(job_files, "real_cluster_in_reach", lambda: True)
    state, message = verdict("11.3", written(tmp_path, RIGHT))
    assert state == "right" and job_files.READ in message, message
    for part in ("srun --label ", "#SBATCH --ntasks-per-node=2\n", "#SBATCH --gpus-per-task=1\n"):
        state, message = verdict("11.3", written(tmp_path, RIGHT.replace(part, "")))
        assert state == "wrong" and "cannot be used" not in message, message


def test_a_slurm_that_does_not_answer_is_no_fault_of_the_file(tmp_path, monkeypatch, job_files):
    silent = "echo 'scontrol: error: Unable to contact slurm controller' >&2; exit 1"
    for name, line in {"sbatch": "echo 7", "scontrol": silent}.items():
        stand_in(tmp_path / name, line)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    monkeypatch.setattr(
        job_files, "trial", lambda nodes: contextlib.nullcontext((environment, tmp_path / "log"))
    )
    state, message = verdict("11.3", written(tmp_path, RIGHT))
    assert state == "open" and message.startswith("could not be tried: scontrol: Unable to contact"), (
        message
    )


TAKEN_HOME = root() / "notebooks" / "scripts" / "train.sbatch"
NOTHING_NEW, TOO_OFTEN = "saved nothing new, and was requeued", "requeued after it had started 1,000 times"
LAST_LINES = [  # of a batch script that requeues its job: what is changed, and what is said to that
    ("", "", ""),
    ('[ "$(newest)" != "$before" ]', "true", NOTHING_NEW),
    ('!= "$before" ]', '!= "" ]', NOTHING_NEW),
    ('[ "${SLURM_RESTART_COUNT:-0}" -lt 50 ]', "true", TOO_OFTEN),
    ("sort -V | tail", "sort | tail", "the newest to it? It says: it has saved nothing new"),
]


@pytest.mark.parametrize(("old", "new", "expected"), LAST_LINES)
@pytest.mark.parametrize("number", ["53.1", "81.5", "train.sbatch"])
def test_a_job_comes_back_only_with_a_newer_checkpoint_and_not_for_ever(
    number, old, new, expected, tmp_path
):
    """One rule for both exercises, whose solutions keep it, and for the script that readers take home."""
    text = (
        TAKEN_HOME.read_text() if number == "train.sbatch" else solved_cells()[number][0].partition("\n")[2]
    )
    name = {"53.1": "work/long-{}.pt", "81.5": "bard-{}/.metadata"}.get(number, "train_ddp-{}.pt")
    assert old in text
    changed = text.replace(old, new)
    if new == "sort | tail":
        changed = changed.replace("%Y", "0")  # as within one second, where the names decide
    check._answers("53")
    requeues = sys.modules["checks.requeues"]
    with pytest.raises(AssertionError, match=re.escape(expected)) if expected else contextlib.nullcontext():
        requeues.require_progress(written(tmp_path, changed), requeues.read(text), name)
