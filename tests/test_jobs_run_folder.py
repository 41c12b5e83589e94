"""Several people on one installation: each works in a folder of their own, and nobody in another's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, submit

WORKER = str(Path(__file__).parent / "programs" / "worker.py")
SUBMIT = f"""
import shutil
shutil.which = lambda name, **options: None  # no Slurm in reach
from mpdemo.jobs import JobSpec, submit
job = submit(JobSpec(name="toy", command=({WORKER!r}, "runs/toy", "train"), out="runs/toy"))
print(job.wait(100))
"""


def spec(*action, out="runs/toy"):
    return JobSpec(name="toy", command=(WORKER, out, *map(str, action)), out=out)


@pytest.fixture
def learner(tmp_path):
    """A learner's folder: the notebooks and the site files, and no package."""
    shutil.copytree(paths.source() / "slurm" / "sites", tmp_path / "course" / "slurm" / "sites")
    (tmp_path / "course" / "notebooks").mkdir()
    return tmp_path / "course"


def test_the_root_is_the_folder_one_works_in(learner, tmp_path, monkeypatch):
    monkeypatch.chdir(learner / "notebooks")
    assert paths.root() == learner
    monkeypatch.chdir(tmp_path)
    assert paths.root() == tmp_path
    monkeypatch.setenv("MPDEMO_ROOT", str(learner))
    assert paths.root() == learner


def test_a_job_of_a_learner_writes_nothing_into_the_installation(learner):
    environment = {key: value for key, value in os.environ.items() if key not in ("SLURM_CONF", "MPDEMO_SITE")}
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT],
        cwd=learner / "notebooks",
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr
    assert json.loads((learner / "runs/toy/job.json").read_text())["spec"]["name"] == "toy"
    assert "toy" not in [path.name for path in (paths.source() / "runs").glob("*")]


def test_the_job_of_another_user_is_neither_taken_nor_overwritten(no_slurm, project, monkeypatch):
    assert submit(spec("train")).wait(100) == "done"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match=r"runs/toy holds the job of another user .*MPDEMO_ROOT"):
        submit(spec("train"))


def test_runs_may_lie_on_another_disk(no_slurm, project, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch" / "me"
    monkeypatch.setenv("MPDEMO_RUNS", str(scratch))
    assert submit(spec("train")).wait(100) == "done"
    assert (scratch / "toy" / "job.json").exists() and (project / "runs").is_symlink()
    monkeypatch.setenv("MPDEMO_RUNS", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="MPDEMO_RUNS is .*elsewhere, but .*runs is there already; do: mv"):
        submit(spec("train", out="runs/other"))
