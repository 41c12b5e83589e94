"""The batch script to take home on a real Slurm: what ends its job, and whether the job starts again."""

import re
import shutil
import time
from pathlib import Path

import pytest
from home_scripts import (
    SCRIPTS,
    SLURM,
    UPDATE,
    asked,
    change,
    content,
    launch,
    log_of,
    lose,
    preempt,
    reach_limit,
    run,
    start_now,
    submit,
    told,
)
from worker_jobs import ended, until

from mpdemo.jobs.slurm_job import look_up
from mpdemo.tools.cluster import Cluster

pytestmark = pytest.mark.nightly
SLOW = UPDATE + "        time.sleep(0.5)\n"
LOOKS = ("LOOK = 8", "LOOK = 1")
NODES = ("--nodes=2", "--gpus-per-node=1")


@pytest.fixture(scope="module")
def own_cluster(slurm_programs):
    """Three nodes, which an urgent partition may take from others' jobs."""
    with Cluster.up(nodes=3, urgent=True) as cluster:
        if cluster.network == "none":
            pytest.skip("node names do not resolve here, so two nodes can't meet")
        yield cluster


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a training says that nobody stops, and all that it saves at its end."""
    folder = shutil.copytree(SCRIPTS, tmp_path_factory.mktemp("whole") / "scripts")
    rows = told(launch(folder, "train_ddp.py", processes=2, changes=[LOOKS]))
    return rows, content(folder / "train_ddp-120.pt")


@pytest.fixture
def copy(own_cluster, tmp_path, monkeypatch):
    """A copy of the folder with a training of a minute."""
    monkeypatch.setenv("SLURM_CONF", own_cluster.environ["SLURM_CONF"])
    copy = Path(shutil.copytree(SCRIPTS, tmp_path / "scripts"))
    change(copy / "train_ddp.py", [LOOKS, (UPDATE, SLOW)], copy / "run.py")
    yield copy
    run(copy, "scancel", "--user=root" if own_cluster.network == "namespaces" else "--me")
    until(lambda: not asked("squeue"), SLURM)


def begin(copy, *options, changes=()) -> str:
    """Submit, and wait for the second epoch; return the job's number."""
    job = submit(copy, "run.py", *NODES, *options, changes=changes)
    until(lambda: "step 30:" in log_of(copy), SLURM)
    return job


def starts_again(copy, job, whole):
    """Wait until a job is back in the queue, and in a second life ends as if nothing had happened."""
    until(lambda: look_up(job).state == "pending", SLURM)
    change(copy / "run.py", [(SLOW, UPDATE)])
    start_now(job)
    assert ended(job) == "done", log_of(copy)
    assert (told(log_of(copy)), content(copy / "train_ddp-120.pt")) == whole
    assert log_of(copy).count("rank 1 of 2 on cpu") == 2


def test_it_saves_before_its_time_limit_and_starts_again(copy, whole):
    job = begin(copy, "--signal=B:USR1@60")
    reach_limit(job)
    starts_again(copy, job, whole)
    log = log_of(copy)
    # at the signal, after 60 steps, which may be the same, and at the end
    saved = log.count("saved; a stop may take")
    assert saved in (2, 3), log


@pytest.mark.parametrize("grace", [20, 0])
def test_it_starts_again_after_an_urgent_job_has_taken_its_node(copy, whole, grace):
    """With a time of grace Slurm sends SIGTERM to the step alone; without one to all, and SIGKILL soon after."""
    change(copy / "run.py", [("SAVE_MINUTES = 60", "SAVE_MINUTES = 20")])
    job = begin(copy)
    preempt(job, grace)
    starts_again(copy, job, whole)
    assert f"Slurm, if it preempts, after {grace + 2} s" in log_of(copy)  # with the cluster's KillWait
    if grace:  # no step was lost
        assert len(re.findall("step [0-9]+:", log_of(copy))) == 120


def test_it_starts_again_after_a_node_has_died(own_cluster, copy, whole):
    change(copy / "run.py", [("SAVE_MINUTES = 60", "SAVE_MINUTES = 20")])
    job = begin(copy)
    nodes = run(copy, "scontrol", "show", "hostnames", asked("squeue", f"--jobs={job}", "--format=%N"))
    lose(own_cluster, nodes.split()[-1])  # not the one with the batch script
    starts_again(copy, job, whole)


def test_it_does_not_start_again_where_it_cannot_save(copy):
    change(copy / "run.py", [("SAVE_MINUTES = 60", "SAVE_MINUTES = 600")])
    job = begin(copy, changes=[("CHECKPOINT=train_ddp", "CHECKPOINT=folder/train_ddp")])
    (copy / "folder").rmdir()
    (copy / "folder").touch()
    run(copy, "scancel", "--batch", "--signal=USR1", job)
    assert ended(job) == "failed"
    assert log_of(copy).count("could not be written") == 1 and "it has saved nothing new" in log_of(copy)


def test_it_does_not_start_again_for_ever(copy):
    job = begin(copy, changes=[("-lt 50", "-lt 1")])
    run(copy, "scancel", "--batch", "--signal=USR1", job)
    start_now(job)
    assert ended(job) == "failed" and "it has started 50 times: look why" in log_of(copy)


def test_it_does_not_start_again_after_scancel(copy):
    """Slurm signals batch script and step together: the training saves, and nobody asked for more."""
    job = begin(copy)
    run(copy, "scancel", job)
    assert ended(job) == "cancelled"
    time.sleep(3)
    assert look_up(job).state == "cancelled" and not asked("squeue", f"--jobs={job}")


def test_the_small_script_which_writes_one_file_starts_again_after_a_warning(copy):
    end = "            save(epoch + 1, model, optimizer)  # 8: one process writes\n"
    change(
        copy / "train_ddp_small.py", [(end, f"{end}        __import__('time').sleep(3)\n")], copy / "run.py"
    )
    job = submit(copy, 'run.py "$CHECKPOINT.pt"', *NODES)
    until(lambda: "epoch 1:" in log_of(copy), SLURM)
    run(copy, "scancel", "--batch", "--signal=USR1", job)
    start_now(job)
    assert ended(job) == "done", log_of(copy)
    assert re.findall(r"epoch (\d+):", log_of(copy)) == [*"01234"]
