"""The trainer's view: real jobs of learners, here and on a real Slurm, read from their folders alone."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from worker_jobs import spec, until

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import submit
from mpdemo.trainers.classroom import HEADERS, learners, row


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a function that makes a learner's folder and works in it."""

    def work_in(name):
        folder = tmp_path / "class" / name
        shutil.copytree(paths.source() / "slurm" / "sites", folder / "slurm" / "sites")
        monkeypatch.setenv("MPDEMO_ROOT", str(folder))
        return folder

    monkeypatch.delenv("MPDEMO_SITE", raising=False)
    return work_in


def cells(folder, identity=None, queue=()):
    return dict(zip(HEADERS[1:], row(folder, identity, dict(queue)), strict=True))


def test_a_table_has_a_row_for_each_learner(place, cluster, run_mpdemo, tmp_path):
    anna = place("anna")
    assert submit(spec(out="runs/00_first")).wait(60) == "done"
    assert submit(spec("fail", "0", "1", out="runs/00_second")).wait(60) == "failed"
    ben = place("ben")
    job = submit(spec("sleep", out="runs/00_endless"))
    until(lambda: job.state == "running")
    (ben / "work").mkdir()
    (ben / "work/right.json").write_text('["03.2", "00.1", "03.10"]')
    files = {file: file.stat().st_mtime_ns for file in anna.rglob("*")}
    done = run_mpdemo("class", str(tmp_path / "class"))
    job.cancel()
    assert done.returncode == 0, done.stderr
    head, _, *rows = [re.split(" {2,}", line.strip()) for line in done.stdout.splitlines()]
    assert head == list(HEADERS)
    assert [row[:-1] for row in rows] == [
        ["anna", "1", "1", "0", "0"],
        ["ben", "00: 1, 03: 2", "0", "0", "0", "0", "00_endless"],
    ]
    assert files == {file: file.stat().st_mtime_ns for file in anna.rglob("*")}  # nothing was written


def test_jobs_of_this_machine_are_read(place, no_slurm):
    folder = place("carl")
    job = submit(spec("sleep"))
    assert cells(folder)["running"] == "toy"
    job.cancel()
    assert cells(folder)["other"] == 1 and cells(folder)["running"] == ""
    (folder / "work").mkdir()
    (folder / "work/right.json").write_text("damaged")
    assert cells(folder)["exercises right"] == ""


def run_folder(folder, name, job, **files):
    """Write a run's folder by hand, with a job.json and other files: name (with _ for a dot) -> text."""
    (folder / "runs" / name).mkdir(parents=True)
    for file, text in {"job.json": job if isinstance(job, str) else json.dumps(job), **files}.items():
        (folder / "runs" / name / file.replace("_", ".")).write_text(text)


JOB = {"id": "7", "where": "cluster x", "identity": "x", "spec": {"name": "b"}, "script": "b.sbatch"}
HERE = {key: value for key, value in JOB.items() if key != "identity"} | {"where": "this machine"}


DAMAGED = [(JOB, {"summary_json": "{"}), (JOB | {"final": None}, {}), (JOB | {"final": "done"}, {})]
DAMAGED += [({**JOB, "script": None}, {"exit-status_txt": "7 x"}), (HERE, {"exit-status_json": "{"})]


@pytest.mark.parametrize(("job", "files"), [*DAMAGED, (HERE | {"host": "another"}, {})])
def test_a_damaged_run_is_counted_and_hides_no_other(place, job, files):
    folder = place("eve")
    run_folder(folder, "a", "{")
    run_folder(folder, "b", job, **files)
    run_folder(folder, "c", JOB | {"final": {"state": "done"}})
    seen = cells(folder, "x")
    assert (seen["other"], seen["done"], sum(seen[word] for word in HEADERS[2:6])) == (1, 1, 2)


def test_a_job_is_only_what_its_cluster_says_of_its_user(place):
    """A learner can write any number, user and state into job.json."""
    folder, own = place("mallory"), os.getuid()
    run_folder(folder, "mine", JOB)
    run_folder(folder, "forged", JOB | {"id": "--user=root", "final": {"state": "running"}})
    assert cells(folder, "x", {"7": (own, "running")})["running"] == "mine"
    assert cells(folder, "x", {"7": (own + 1, "running")})["running"] == ""  # of another user
    assert cells(folder, "y", {"7": (own, "running")})["running"] == ""  # of another cluster


def test_a_folder_that_cannot_be_read_is_said_in_its_row(place, tmp_path, monkeypatch):
    """Given by its own name or found; beside it lie folders in which nobody works."""
    folder = place("frank")
    for other in (".cache", "notes"):
        (folder.parent / other).mkdir()
    listed = Path.iterdir

    def iterdir(path):
        if path == folder:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)  # root, who runs this in CI, may read everything
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    assert learners([tmp_path / "class"]) == learners([folder]) == [folder]
    assert cells(folder)["exercises right"] == "cannot be read: Permission denied"


def test_runs_that_lie_elsewhere_are_counted_and_measured(place, tmp_path):
    """As with MPDEMO_RUNS: runs/ is a link."""
    folder = place("grace")
    (tmp_path / "disk").mkdir()
    (folder / "runs").symlink_to(tmp_path / "disk")
    run_folder(folder, "a", JOB | {"final": {"state": "done"}}, model_pt="x" * 3 * 2**20)
    seen = cells(folder)
    assert seen["done"] == 1 and int(seen["MiB in runs"]) >= 3


def test_a_folder_in_which_nobody_works_is_refused(tmp_path):
    with pytest.raises(UserError, match="give learners' folders"):
        learners([tmp_path])
    with pytest.raises(UserError, match="is no folder, or hidden"):
        learners(["x" * 5000])  # the system refuses to look, as below a folder that one may not enter
