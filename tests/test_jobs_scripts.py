"""The committed batch scripts, one of each kind of job, submitted by hand. This file, run, writes them anew."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from worker_jobs import ended, stand_in

from mpdemo import paths
from mpdemo.jobs import check, load_site, render, spec_of

FOLDER = paths.root() / "slurm"
TRAIN, STANDALONE = "-m mpdemo.rungs.ddp --out runs", "torchrun --standalone --nproc-per-node=2"
KINDS = {
    "one_node": spec_of(f"{STANDALONE} {TRAIN}/one_node"),
    "two_nodes": spec_of(f"python {TRAIN}/two_nodes", nodes=2),
    "torchrun": spec_of(f"torchrun --nproc-per-node=2 {TRAIN}/torchrun", nodes=2),
    "one_process": spec_of("python -m mpdemo.rungs.data_parallel --devices 2 --out runs/one_process"),
    "cpu": spec_of(f"{STANDALONE} {TRAIN}/cpu", gpus_per_process=0),
}
SHARDED = spec_of("python -m mpdemo.rungs.fsdp --out runs/sharded", processes_per_node=2)
FOLDERS = (".", "slurm", "notebooks")  # of the project, from which the files are submitted in turn
# What stands for Python: a training run is too long for every file; test_notebooks.py runs them whole. Some really
# train, for a few steps.
PYTHON = f"""
case $SLURM_JOB_NAME in {{trained}}) exec {sys.executable} "$@" --steps 3 --log-every 1 ;; esac
case "$*" in *"-m mpdemo.rungs."*) [ -d runs ] ;; *) false ;; esac"""


@pytest.mark.parametrize("name", KINDS)
def test_a_committed_script_is_what_the_course_renders(name):
    text = render(KINDS[name], load_site("generic"))
    assert (FOLDER / f"{name}.sbatch").read_text() == text, (
        f"if that is meant: python {Path(__file__).name}"
    )
    assert check(text, "generic", ask_slurm=False) == []
    assert {file.stem for file in FOLDER.glob("*.sbatch")} == set(KINDS)


@pytest.fixture
def clone(tmp_path):
    """A project as it is cloned."""
    for folder in ("mpdemo", "slurm", "notebooks/labs"):
        shutil.copytree(paths.root() / folder, tmp_path / "clone" / folder)
    return tmp_path / "clone"


def submit_by_hand(script, folder, *options) -> str:
    """Type ``sbatch SCRIPT`` in a folder, in a shell in which no Python is activated; return the job's number."""
    path = os.pathsep.join(
        p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != Path(sys.executable).parent
    )
    command = ["sbatch", "--parsable", *options, os.path.relpath(script, folder)]
    env = os.environ | {"PATH": path}
    return subprocess.check_output(command, cwd=folder, env=env, text=True).strip()


@pytest.mark.parametrize(
    "trained",
    [["sharded"], pytest.param(["two_nodes", "torchrun"], marks=pytest.mark.nightly)],
    ids=str,
)
def test_each_runs_when_it_is_submitted_by_hand_from_any_folder_of_the_project(cluster, clone, trained):
    """With the project's own Python, not activated; also a sharded rung, over two nodes by sbatch's command line."""
    specs = KINDS | {"sharded": SHARDED}
    stand_in(
        clone / ".venv/bin/python", PYTHON.format(trained="|".join(specs[name].name for name in trained))
    )
    sharded = clone / "slurm/sharded.sbatch"
    sharded.write_text(render(SHARDED, load_site("generic")))
    jobs = {
        submit_by_hand(sharded, clone, "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1"): (
            "sharded",
            clone,
        )
    }
    for number, name in enumerate(KINDS):
        folder = clone / FOLDERS[number % len(FOLDERS)]
        jobs[submit_by_hand(clone / f"slurm/{name}.sbatch", folder)] = name, folder
    for job, (name, folder) in jobs.items():
        assert ended(job, 600) == "done", f"{name}: {(folder / f'slurm-{job}.out').read_text()}"
    written = {
        file.parent.name: file.read_text().split() for file in (clone / "runs").glob("*/exit-status.txt")
    }
    assert written.keys() == {spec.out.removeprefix("runs/") for spec in specs.values()}
    assert all(job in jobs and status == "0" for job, status in written.values())
    for name in trained:
        summary = json.loads((clone / specs[name].out / "summary.json").read_text())
        assert summary["world_size"] == specs[name].world_size, name


def test_one_submitted_from_elsewhere_says_what_to_type(cluster, clone, tmp_path):
    job = submit_by_hand(clone / "slurm/one_node.sbatch", tmp_path)
    assert ended(job) == "failed"
    assert "call sbatch in the project's folder" in (tmp_path / f"slurm-{job}.out").read_text()


if __name__ == "__main__":
    for kind, job in KINDS.items():
        (FOLDER / f"{kind}.sbatch").write_text(render(job, load_site("generic")))
