"""Every notebook of the course: run from a fresh clone, with Slurm and without, and compared strictly.

Each is executed by nbval in a copy of the project of its own, so no run, script or picture of another day helps it;
only the single device's run, which most compare with, is handed on. Each may run in another worker.
Then the job scripts that it wrote must be the committed ones.
"""

import dataclasses
import difflib
import json
import shutil

import pytest
from project import fresh_copy

from mpdemo.jobs.job import RECORD
from mpdemo.paths import root
from mpdemo.trainers import jobs_of_course
from notebooks import NBVAL_LIMIT, TRAINS_SINGLE, check, nbval, notebooks

NOTEBOOKS = [str(path.relative_to(root() / "notebooks").with_suffix("")) for path in notebooks()]
LEARNERS = [name for name in NOTEBOOKS if "/" not in name]
# Where a job runs is the concern of mpdemo.jobs alone: the notebooks take turns.
RUNS = [(name, "this machine" if name[:2] in ("01", "05", "08", "11") else "cluster") for name in LEARNERS]
LONGEST = ("11", "09", "08", "07", "10", "12")
RUNS.sort(key=lambda run: LONGEST.index(run[0][:2]) if run[0][:2] in LONGEST else len(LONGEST))
SINGLE = "runs/train_single"


def settings_of(place, request, monkeypatch):
    """Jobs run on this machine, or on a real Slurm with four nodes."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return dict(request.getfixturevalue("shared_cluster").environ) if place == "cluster" else {}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder that keeps the single device's run, by place: a worker's first notebook trains it, the others find it.

    Not shared by all workers, since each has a Slurm of its own, and a job is found only on the cluster that ran it.
    """
    return tmp_path_factory.mktemp("trained")


@pytest.mark.timeout(NBVAL_LIMIT + 60)
@pytest.mark.parametrize(("name", "place"), RUNS)
def test_notebook_gives_the_saved_outputs(name, place, tmp_path, trained, request, monkeypatch):
    where = settings_of(place, request, monkeypatch)
    project, kept = fresh_copy(tmp_path / "project"), trained / place
    if kept.exists() and TRAINS_SINGLE in (project / "notebooks" / f"{name}.ipynb").read_text():
        shutil.copytree(kept, project / SINGLE)
    done = nbval(name, project, **where)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    if (project / SINGLE / "summary.json").exists() and not kept.exists():
        shutil.copytree(project / SINGLE, kept)
    problems = [*changed_scripts(project), *changed_jobs(project)]
    assert not problems, "\n".join(problems)


def changed_scripts(project) -> list:
    """Compare the scripts that the notebook wrote with the committed ones."""
    problems = []
    for script in sorted((project / "slurm").glob("*.sbatch")):
        committed = root() / "slurm" / script.name
        accept = "if that is meant: python tests/notebooks.py, look at git diff slurm/, commit"
        if not committed.exists():
            problems.append(f"slurm/{script.name} is written by the notebook and not committed; {accept}")
            continue
        before, after = (file.read_text().splitlines() for file in (committed, script))
        lines = [line for line in difflib.unified_diff(before, after, "committed", "written now", lineterm="", n=0)]
        if lines:
            problems.append("\n".join([f"slurm/{script.name} would change; {accept}", *lines]))
    return problems


def changed_jobs(project) -> list:
    """Compare the jobs that the notebook submitted with the list that is rehearsed and rendered."""
    problems = []
    for name, spec in jobs_of_course().items():
        record = project / spec.out / RECORD
        submitted = json.loads(record.read_text())["spec"] | {"oversubscribe": False} if record.exists() else None
        if submitted not in (None, json.loads(json.dumps(dataclasses.asdict(spec)))):
            problems.append(f"slurm/course.toml: {name} is not what the notebook submits: {submitted}")
    return problems


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_in_order(name):
    problems = check(root() / "notebooks" / f"{name}.ipynb")
    assert not problems, "\n".join(problems)


def test_a_changed_script_is_told_line_by_line(tmp_path):
    (tmp_path / "slurm").mkdir()
    assert changed_scripts(tmp_path) == []
    (tmp_path / "slurm" / "99_new.sbatch").write_text("#!/bin/bash\n")
    assert "slurm/99_new.sbatch is written by the notebook and not committed" in changed_scripts(tmp_path)[0]
