"""Every notebook of the course: run from a fresh clone, on this machine or a Slurm, and compared strictly.

Each is executed by nbval in a copy of the project of its own, so no run, script or picture of another day helps it.
Each may run in another worker.
Then the jobs that it submitted must be those of slurm/course.toml.
"""

import dataclasses
import json

import documents
import nbformat
import pytest
from project import fresh_copy

from mpdemo.jobs.job import RECORD
from mpdemo.tools.support.render import jobs_of_course
from notebooks import NBVAL_LIMIT, ON_TWO_NODES, nbval

SECONDS = {
    path.stem: nbformat.read(path, as_version=4).metadata.mpdemo.seconds for path in documents.notebooks()
}
ORDER = sorted(SECONDS, key=SECONDS.get, reverse=True)
# at night all run in both places
RUNS = [(name, "cluster" if name[:2] in ON_TWO_NODES else "this machine", False) for name in ORDER]
AT_NIGHT = [(name, place, True) for name in ORDER for place in ("this machine", "cluster")]


@pytest.mark.timeout(NBVAL_LIMIT + 60)
@pytest.mark.parametrize(
    ("name", "place", "whole"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.nightly) for run in AT_NIGHT)],
)
def test_notebook_gives_the_saved_outputs(name, place, whole, tmp_path, request, monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    where = request.getfixturevalue("shared_cluster").environ if place == "cluster" else {}
    project = fresh_copy(tmp_path / "project")
    done = nbval(name, project, whole, **where)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert changed_jobs(project) == []


def changed_jobs(project) -> list:
    """Compare the jobs that the notebook submitted with the list that is rehearsed and rendered."""
    problems = []
    for name, spec in jobs_of_course().items():
        record = project / spec.out / RECORD
        submitted = (
            json.loads(record.read_text())["spec"] | {"oversubscribe": False} if record.exists() else None
        )
        if submitted not in (None, json.loads(json.dumps(dataclasses.asdict(spec)))):
            problems.append(f"slurm/course.toml: {name} is not what the notebook submits: {submitted}")
    return problems
