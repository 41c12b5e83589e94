"""The trainer's view: real jobs of two learners, here and on a real Slurm, read from their folders alone."""

import json
import os
import shutil
from pathlib import Path

import pytest
from test_jobs_slurm import until

from mpdemo import paths
from mpdemo.classroom.learner import Queue, learners, look
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, submit
from mpdemo.notebook.check import RIGHT, check, right_answers

WORKER = str(Path(__file__).parent / "programs" / "worker.py")


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


def spec(name, *action):
    out = f"runs/{name}"
    return JobSpec(name=name, command=(WORKER, out, *action), out=out)


def rows(text):
    """Return the cells of the table's rows by learner."""
    lines = [line for line in text.splitlines() if line.strip()]
    edges = [0, *(i + 2 for i in range(len(lines[1]) - 1) if lines[1][i : i + 2] == "  ")]
    cells = [[line[a:b].strip() for a, b in zip(edges, [*edges[1:], None], strict=True)] for line in lines]
    head = cells[0]
    return {row[0]: dict(zip(head, row, strict=True)) for row in cells[2:]}


def test_a_table_has_a_row_for_each_learner_and_cancel_ends_what_runs(place, cluster, run_mpdemo, tmp_path):
    anna = place("anna")
    assert submit(spec("00_first")).wait(60) == "done"
    assert submit(spec("00_second", "fail", "0", "1")).wait(60) == "failed"
    ben = place("ben")
    job = submit(spec("00_endless", "sleep"))
    until(lambda: job.state == "running")
    (ben / RIGHT).parent.mkdir()
    (ben / RIGHT).write_text('["03.2", "00.1", "03.10"]')
    files = {file: file.stat().st_mtime_ns for file in anna.rglob("*")}

    done = run_mpdemo("class", str(tmp_path / "class"), "--collect", str(tmp_path / "all.json"))
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout.partition("collected")[0])
    assert table["anna"] | {"done": "1", "failed": "1", "pending": "0", "running": ""} == table["anna"]
    assert table["ben"] | {"exercises right": "00: 1, 03: 2", "running": "00_endless"} == table["ben"]
    collected = json.loads((tmp_path / "all.json").read_text())
    assert [run["state"] for run in collected[0]["runs"]] == ["done", "failed"]
    assert files == {file: file.stat().st_mtime_ns for file in anna.rglob("*")}  # nothing was written

    done = run_mpdemo("class", str(ben), "--cancel")
    assert f"ben: job {job.id} (00_endless) cancelled" in done.stdout and done.returncode == 0
    assert job.wait(60) == "cancelled"


def test_jobs_of_this_machine_are_read_and_cancelled(place, no_slurm, tmp_path, run_mpdemo):
    folder = place("carl")
    job = submit(spec("00_endless", "sleep"))
    assert look(folder, Queue()).runs[0].state == "running"
    done = run_mpdemo("class", str(folder), "--cancel", PATH="/nowhere")
    assert done.returncode == 0 and "cancelled" in done.stdout, done.stderr
    assert job.wait(20) == "cancelled" and look(folder, Queue()).runs[0].state == "cancelled"


def test_a_right_answer_is_remembered(place, capsys):
    folder = place("dora")
    for answer in ("b", "ac", "ac"):
        check("00.1", answer)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["not", "right.", "right."]
    assert right_answers(folder) == ["00.1"]
    (folder / RIGHT).write_text("damaged")
    assert right_answers(folder) == []


def run_folder(folder, name, job, **files):
    """Write a run's folder by hand, with a job.json and other files: name (with _ for a dot) -> text."""
    (folder / "runs" / name).mkdir(parents=True)
    for file, text in {"job.json": job if isinstance(job, str) else json.dumps(job), **files}.items():
        (folder / "runs" / name / file.replace("_", ".")).write_text(text)


JOB = {"id": "7", "where": "cluster x", "identity": "x", "spec": {"name": "b"}, "script": "b.sbatch"}
HERE = JOB | {"where": "this machine"}


@pytest.mark.parametrize(
    ("job", "files"),
    [
        (JOB, {"summary_json": "{"}),
        (JOB | {"final": None}, {}),
        (JOB | {"final": {}}, {}),
        (JOB | {"final": "done"}, {}),
        ({**JOB, "script": None}, {"exit-status_txt": "7 x"}),
        (HERE | {"id": "abc"}, {}),
        (HERE, {"exit-status_json": "{"}),
        (HERE | {"host": "another"}, {}),
    ],
)
def test_a_damaged_run_is_unknown_and_hides_no_other(place, job, files):
    folder = place("eve")
    run_folder(folder, "a", "{")
    run_folder(folder, "b", job, **files)
    run_folder(folder, "c", JOB, exit_status_txt="")
    assert [(run.name, run.state) for run in look(folder, Queue("x")).runs] == [("b", "unknown"), ("c", "unknown")]


def test_a_job_is_only_what_its_cluster_says_of_its_user(place):
    """A learner can write any number, user and state into job.json: nobody else's job may end for it."""
    folder, own = place("mallory"), os.getuid()
    run_folder(folder, "mine", JOB)
    assert look(folder, Queue("x", {"7": (own, "running")})).count("running") == 1
    assert look(folder, Queue("x", {"7": (own + 1, "running")})).count("running") == 0  # of another user
    assert look(folder, Queue("y", {"7": (own, "running")})).count("running") == 0  # of another cluster
    run_folder(folder, "forged", JOB | {"id": "--user=root", "final": {"state": "running"}})
    assert look(folder, Queue("x", {})).count("running") == 0


def test_a_folder_that_cannot_be_read_is_said_in_its_row(place, tmp_path, monkeypatch):
    folder = place("frank")
    (folder / "runs").mkdir()
    closed = Path.iterdir

    def iterdir(path):
        if path == folder:
            raise PermissionError(13, "Permission denied")
        return closed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)  # root, who runs this in CI, may read everything
    assert learners([tmp_path / "class"]) == [folder]
    assert look(folder, Queue()).problem == "cannot be read: Permission denied"


def test_a_folder_in_which_nobody_works_is_refused(tmp_path):
    with pytest.raises(UserError, match="nobody works there yet"):
        learners([tmp_path])
    with pytest.raises(UserError, match="is no folder"):
        learners([tmp_path / "no"])
    with pytest.raises(UserError, match="is no folder, or hidden"):
        learners(["x" * 5000])  # the system refuses to look, as below a folder that one may not enter
