"""Whatever a file holds that somebody else wrote: one line or a right answer, soon, and nothing else has changed."""

import gzip
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import hostile
import pytest
from test_notebook_records import ROW

from mpdemo import foreign, paths
from mpdemo.errors import UserError
from mpdemo.jobs.job import Job, read_record
from mpdemo.measure import traces
from mpdemo.notebook.job_widget import JobView
from mpdemo.notebook.records import beside
from mpdemo.tools.plan.records import efficiency_of
from mpdemo.world.processes import start_time


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """The folder of all hostile files."""
    folder = tmp_path_factory.mktemp("bad")
    hostile.files(folder)
    return folder


def test_json_is_read_packed_or_not_and_its_fields_have_types(tmp_path):
    file = tmp_path / "file"
    row = {"name": "é", "steps": 3, "seconds": 1.5, "more": [None]}
    for content in (json.dumps(row).encode(), gzip.compress(json.dumps(row).encode())):
        file.write_bytes(content)
        assert foreign.unpacked(file) == row
    assert foreign.typed(row, steps=float, seconds=int | float, other=str) == {"steps": 3, "seconds": 1.5}
    for fields in ({"name": int}, {"steps": str}, {"seconds": int}, {"more": dict}):
        with pytest.raises(TypeError, match=f"^{next(iter(fields))} can't be "):
            foreign.typed(row, **fields)
    for number in (float("nan"), float("inf"), -(10**400)):
        with pytest.raises(TypeError, match="^steps can't be "):
            foreign.typed({"steps": number}, steps=float)


def test_the_end_of_a_file_is_read_and_blocks_of_nuls_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign, "BLOCK", 4)
    file = tmp_path / "log"
    file.write_bytes(b"ab" + bytes(20) + b"cdefgh" + bytes(9) + b"i")
    text, cut = foreign.tail(file, 99)
    assert text.replace(b"\0", b"") == b"abcdefghi" and len(text) < 20 and not cut
    text, cut = foreign.tail(file, 8)
    assert text.replace(b"\0", b"").endswith(b"hi") and len(text) == 8 and cut
    os.truncate(file, 2**40)  # a hole
    assert foreign.tail(file, 8)[0].rstrip(b"\0").endswith(b"i") and not foreign.tail(file, 99)[1]


READERS = {
    "traces": lambda file: traces.read([file]),
    "plan --record": lambda file: efficiency_of(file, "h100"),
}


@pytest.mark.timeout(10, func_only=True)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", hostile.NAMES)
def test_a_reader_answers_any_file_in_one_line(bad, reader, name):
    with pytest.raises(UserError) as refused:
        READERS[reader](bad / name)
    assert name in str(refused.value) and "\n" not in str(refused.value)


def test_records_of_gpus_that_are_none_are_a_line_each(bad, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    for number, name in enumerate(hostile.NAMES):
        (tmp_path / f"runs/gpu/{number}").mkdir(parents=True)
        (tmp_path / f"runs/gpu/{number}/record.json").symlink_to(bad / name)
    # no circle
    assert " ".join(repr(beside("ddp", ROW)).split()).count("is no record") == len(hostile.NAMES) - 1


RECORD = {"id": "99999999", "where": "this machine", "script": "s", "submitted": 1, "spec": {"name": "toy"}}
OF_SLURM = RECORD | {"id": "8", "identity": "a b c d"}
NAN, HUGE = float("nan"), 10**30


@pytest.fixture
def run(tmp_path, no_slurm, monkeypatch):
    """A function that makes a run's folder in a project of its own, with a job's record and other files."""
    monkeypatch.setenv("MPDEMO_ROOT", str(tmp_path))

    def make(record, name="toy", **more):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        for file, content in {"job.json": json.dumps(record), **more}.items():
            (folder / file).write_text(content)
        return folder

    return make


def test_security_md_is_right_that_explain_only_reads(run, tmp_path, call_mpdemo):
    """Whatever a record names: the folder of a job that lives, or a file behind a link."""
    assert "`mpdemo explain` only reads" in Path("SECURITY.md").read_text()
    alive, mine = Path(tempfile.mkdtemp(prefix="mpdemo-")), tmp_path / "mine"
    mine.write_text("precious")
    ended = "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-11-28T10:00:00 ***\n"
    folders = run(RECORD | {"scratch": str(alive)}, "a"), run(OF_SLURM, "b", **{"slurm-8.out": ended})
    (folders[1] / "job.json.part").symlink_to(mine)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    for what in (*folders, 99999999):
        done = call_mpdemo("explain", what)
        assert done.returncode == 0 and " cancelled (" in done.stdout
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert alive.is_dir() and mine.read_text() == "precious"
    # the owner's notebook
    Job(read_record(folders[1]), folders[1]).remember(Job(OF_SLURM, folders[1]).answer)
    assert mine.read_text() == "precious" and "cancelled" in (folders[1] / "job.json").read_text()
    alive.rmdir()


def test_no_process_is_ended_because_a_record_names_it(run):
    """As in a copy of a project: only who writes the log of the run's folder is its job."""
    with subprocess.Popen(["sleep", "60"]) as other:
        folder = run(RECORD | {"id": other.pid, "started": start_time(other.pid)}, **{"log.txt": ""})
        job = Job(read_record(folder), folder)
        assert job.state == "running"
        for act in job.cancel, job.warn:
            with pytest.raises(UserError, match=f"process {other.pid} does not write runs/toy/log.txt"):
                act()
        assert other.poll() is None
        other.kill()


def test_security_md_is_right_that_checkpoints_are_read_without_code():
    files = [file for folder in ("mpdemo", "notebooks") for file in (paths.source() / folder).rglob("*.py")]
    loads = {
        file: re.findall(r"torch\.load\(.*", file.read_text()) for file in files if "same" not in file.parts
    }
    assert sum(map(len, loads.values())) > 5 and not [
        file for file in loads if "=False" in " ".join(loads[file])
    ]


@pytest.mark.parametrize("record", [
    RECORD | {"id": "abc"}, RECORD | {"id": -1}, RECORD | {"id": HUGE}, RECORD | {"id": "1;2"}, RECORD | {"id": None},
    RECORD | {"where": 3}, RECORD | {"script": []}, RECORD | {"spec": []}, RECORD | {"spec": {"name": 3}},
    RECORD | {"spec": {"name": "toy", "command": 7}}, RECORD | {"started": "x"}, RECORD | {"submitted": NAN},
    RECORD | {"host": 1}, OF_SLURM | {"identity": 7}, OF_SLURM | {"polling_seconds": HUGE}, OF_SLURM | {"final": 3},
    OF_SLURM | {"final": {}}, OF_SLURM | {"final": {"state": "x"}},
    OF_SLURM | {"final": {"state": "x", "run_time": NAN}},
], ids=str)  # fmt: skip
def test_a_record_with_other_values_is_one_line(run, call_mpdemo, record):
    done = call_mpdemo("explain", run(record))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "job.json is damaged" in done.stderr


@pytest.mark.timeout(10, func_only=True)
@pytest.mark.parametrize(
    "file", ["job.json", "exit-status.json", "log.txt", "slurm-8.out", "exit-status.txt", "metrics.jsonl"]
)
@pytest.mark.parametrize("name", hostile.NAMES)
def test_a_run_with_any_file_is_explained_or_refused_in_one_line(bad, run, call_mpdemo, file, name):
    folder = run(OF_SLURM if "8" in file or file.endswith("status.txt") else RECORD)
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to(bad / name)
    done = call_mpdemo("explain", folder)
    assert done.returncode in (0, 2) and done.stderr.count("\n") == done.returncode / 2


ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\u2066<img src=x>\n"


def test_what_a_record_or_a_log_says_is_printed_without_escapes_and_shown_without_html(run, call_mpdemo):
    spec, final = {"name": ESCAPES}, {"state": "failed", "reason": ESCAPES, "run_time": 3.0}
    record = OF_SLURM | {"where": ESCAPES, "spec": spec, "final": final}
    log = f'{json.dumps({"message": f"ValueError: {ESCAPES}"})}\n  File "{ESCAPES}'
    rows = [
        {},
        {"event": "step", "step": "<img src=x>", "loss": 1},
        {"event": "step", "step": 3, "loss": "<img src=x>"},
    ]
    rows += [{"event": "step", "step": 3, "loss": 1.0, "steps": 9}, {"event": 7, "steps": "<img src=x>"}]
    rows += [{"event": "step", "step": 4, "loss": 2, "mfu": "<img src=x>"}]
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    folder = run(record, "toy", **{"slurm-8.out": log, "metrics.jsonl": metrics})
    for said in (
        call_mpdemo("explain", folder).stdout,
        Job(record, folder).failure(),
        repr(Job(record, folder)),
    ):
        assert "<img" in said and not re.search(
            "[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", said
        )
    view = JobView(Job(record | {"final": {"state": ESCAPES}}, folder))
    assert view.total == 9 and "step 4 of 9, loss 2.0000" in view.header()
    assert "<img" not in view.header() + view.chart() + view.log_tail()
