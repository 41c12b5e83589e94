"""The committed batch scripts, one of each kind, submitted by hand. This file, run, writes them anew."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpdemo import paths
from mpdemo.jobs import check, load_site, render
from mpdemo.jobs.slurm_job import look_up
from mpdemo.trainers.course import jobs_of_course

FOLDER = paths.root() / "slurm"
COURSE = jobs_of_course()
DDP = COURSE["03_ddp"]
KINDS = {name: COURSE[name] for name in ("03_ddp", "03_two_nodes", "02_data_parallel")}
for kind, words in {"03_torchrun": {"launcher": "torchrun", "nodes": 2}, "03_cpu": {"gpus_per_process": 0}}.items():
    command = tuple(f"runs/{kind}" if word == DDP.out else word for word in DDP.command)
    KINDS[kind] = replace(DDP, name=kind, command=command, out=f"runs/{kind}", **words)
FOLDERS = (".", "slurm", "notebooks")  # of the project, from which the files are submitted in turn
# What stands for a command: its settings are checked as by the training, which is too long to be run for every file;
# test_notebooks.py runs them whole. Some on several nodes really train, for a few steps.
CHECK = """
import argparse, importlib.util, os, sys
from mpdemo.options import options_from
from mpdemo.settings import Settings, checked
from mpdemo.training.command import add_arguments
start, option, module, *words = sys.argv
if module == "mpdemo":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    checked(options_from(parser.parse_args(words[1:]), Settings), int(os.environ["SLURM_NTASKS"]))
assert importlib.util.find_spec(module) and os.path.isdir("runs")
"""
PYTHON = f"""#!/bin/bash
[ "$SLURM_JOB_NUM_NODES" = 2 -o "$TRAIN" ] && exec {sys.executable} "$@" --steps 3 --log-every 1
exec {sys.executable} -c '{CHECK}' "$@"
"""


@pytest.mark.parametrize("name", KINDS)
def test_a_committed_script_is_what_the_course_renders(name):
    text = render(KINDS[name], load_site("generic"))
    assert (FOLDER / f"{name}.sbatch").read_text() == text, f"if that is meant: python {Path(__file__).name}"
    assert check(text, "generic", ask_slurm=False) == []
    assert {file.stem for file in FOLDER.glob("*.sbatch")} == set(KINDS)


@pytest.fixture
def clone(tmp_path):
    """A project as it is cloned, with its Python installed and not activated."""
    for folder in ("mpdemo", "slurm", "notebooks/labs"):
        shutil.copytree(paths.root() / folder, tmp_path / "clone" / folder)
    (tmp_path / "clone/.venv/bin").mkdir(parents=True)
    python = tmp_path / "clone/.venv/bin/python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path / "clone"


def submit_by_hand(script, folder, *options, **variables) -> str:
    """Type ``sbatch SCRIPT`` in a folder, in a shell in which no Python is activated; return the job's number."""
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != Path(sys.executable).parent)
    command = ["sbatch", "--parsable", *options, os.path.relpath(script, folder)]
    environment = os.environ | {"PATH": path} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(jobs, seconds=600) -> dict:
    """Wait for the end of all jobs; return the state of each by its number."""
    end = time.monotonic() + seconds
    while (states := {job: look_up(job).state for job in jobs}) and {"pending", "running"} & set(states.values()):
        assert time.monotonic() < end, states
        time.sleep(1)
    return states


def test_each_runs_when_it_is_submitted_by_hand_from_any_folder_of_the_project(cluster, clone):
    folders = [clone / FOLDERS[number % len(FOLDERS)] for number in range(len(KINDS))]
    jobs = {
        submit_by_hand(clone / f"slurm/{name}.sbatch", folder): (name, folder)
        for name, folder in zip(KINDS, folders, strict=True)
    }
    for job, state in wait_for(jobs).items():
        name, folder = jobs[job]
        assert state == "done", f"{name}: {(folder / f'slurm-{job}.out').read_text()}"
    written = {file.parent.name: file.read_text().split() for file in (clone / "runs").glob("*/exit-status.txt")}
    assert written.keys() == {spec.out.removeprefix("runs/") for spec in KINDS.values()}
    assert all(job in jobs and status == "0" for job, status in written.values())


def test_one_submitted_from_elsewhere_says_what_to_type(cluster, clone, tmp_path):
    job = submit_by_hand(clone / "slurm/03_ddp.sbatch", tmp_path)
    assert wait_for([job]) == {job: "failed"}
    assert "call sbatch in the project's folder" in (tmp_path / f"slurm-{job}.out").read_text()


def test_sharded_rungs_train_over_several_nodes(cluster, clone):
    """The jobs of notebook 07, laid over two and four nodes on sbatch's command line: the same training each time."""
    losses = {}
    for name, nodes in (("07_fsdp", 2), ("07_fsdp", 4), ("07_tensor", 2)):
        (script := clone / "slurm" / f"{name}.sbatch").write_text(render(COURSE[name], load_site("generic")))
        job = submit_by_hand(script, clone, f"--nodes={nodes}", "--ntasks-per-node=1", "--gres=gpu:1", TRAIN="yes")
        assert wait_for([job]) == {job: "done"}, (clone / f"slurm-{job}.out").read_text()
        out = clone / COURSE[name].out
        assert json.loads((out / "summary.json").read_text())["world_size"] == nodes
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[name, nodes] = [row["loss"] for row in rows if row["event"] == "step"]
    first, *others = losses.values()
    assert len(first) == 3
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)


if __name__ == "__main__":
    for kind, job in KINDS.items():
        (FOLDER / f"{kind}.sbatch").write_text(render(job, load_site("generic")))
