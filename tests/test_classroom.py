"""The trainer's view: real jobs of two learners, here and on a real Slurm, read from their folders alone."""

import json
import shutil
import time
from pathlib import Path

import pytest

from mpdemo import paths
from mpdemo.classroom.learner import learners, look
from mpdemo.errors import UserError
from mpdemo.exercises import check
from mpdemo.exercises.progress import FILE, right_answers
from mpdemo.jobs import JobSpec, submit

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
    end = time.monotonic() + 60
    while job.state != "running":
        assert time.monotonic() < end, "it did not start"
        time.sleep(0.1)
    (ben / FILE).parent.mkdir()
    (ben / FILE).write_text('["03.2", "00.1", "03.10"]')
    files = {file: file.stat().st_mtime_ns for file in anna.rglob("*")}

    done = run_mpdemo("class", str(tmp_path / "class"), "--collect", str(tmp_path / "all.json"))
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout.partition("collected")[0])
    assert table["anna"] | {"done": "1", "failed": "1", "waiting": "0", "now running": ""} == table["anna"]
    assert table["ben"] | {"exercises right": "00: 1, 03: 2", "now running": "00_endless"} == table["ben"]
    collected = json.loads((tmp_path / "all.json").read_text())
    assert [run["state"] for run in collected[0]["runs"]] == ["done", "failed"]
    assert files == {file: file.stat().st_mtime_ns for file in anna.rglob("*")}  # nothing was written

    done = run_mpdemo("class", str(ben), "--cancel")
    assert f"ben: job {job.id} (00_endless) cancelled" in done.stdout and done.returncode == 0
    assert job.wait(60) == "cancelled"


def test_jobs_of_this_machine_are_read_and_cancelled(place, no_slurm, tmp_path, run_mpdemo):
    folder = place("carl")
    job = submit(spec("00_endless", "sleep"))
    assert look(folder, {}).runs[0].state == "running"
    done = run_mpdemo("class", str(folder), "--cancel", PATH="/nowhere")
    assert done.returncode == 0 and "cancelled" in done.stdout, done.stderr
    assert job.wait(20) == "cancelled" and look(folder, {}).runs[0].state == "cancelled"


def test_a_right_answer_is_remembered(place, capsys):
    folder = place("dora")
    for answer in ("b", "ac", "ac"):
        check("00.1", answer)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["not", "right.", "right."]
    assert right_answers(folder) == ["00.1"]
    (folder / FILE).write_text("damaged")
    assert right_answers(folder) == []


def test_damaged_files_of_one_run_hide_no_other(place):
    folder = place("eve")
    for name, text in {"a": "{", "b": json.dumps({"id": 7, "where": "cluster x", "spec": {"name": "b"}})}.items():
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "job.json").write_text(text)
    (folder / "runs" / "b" / "summary.json").write_text("{")
    assert [(run.name, run.state) for run in look(folder, {}).runs] == [("b", "unknown")]
    assert look(folder, {"7": "pending"}).count("pending") == 1


def test_a_folder_in_which_nobody_works_is_refused(tmp_path):
    with pytest.raises(UserError, match="nobody works there yet"):
        learners([tmp_path])
    with pytest.raises(UserError, match="is no folder"):
        learners([tmp_path / "no"])
