"""JupyterLab in a job: its own jobs as steps of that one, on a real Slurm."""

import dataclasses
import functools
import re
import time

import psutil
import pytest
import worker_jobs

from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, attach, load_site, slurm, submit

NO_GPUS = {"gpus_per_process": 0, "cpus_per_process": 4}
STEPS = dataclasses.replace(load_site("generic"), inside_a_job="steps", cores_per_node=16)
spec = functools.partial(worker_jobs.spec, processes_per_node=2)
until = functools.partial(worker_jobs.until, seconds=60)


@pytest.fixture(scope="module")
def allocation(shared_cluster):
    """The environment inside a job that holds two GPUs and eight CPUs on each of two nodes (or of one)."""
    nodes = 1 if shared_cluster.network == "none" else 2  # else node names do not resolve
    words = ["salloc", "--no-shell", f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=8", "--gres=gpu:2"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shared_cluster.environ.items():
            patch.setenv(name, value)
        granted = slurm.run(*words, "--time=01:00:00").stderr
        number = re.search(r"Granted job allocation (\d+)", granted)[1]
        names = slurm.client("squeue", "-h", "-j", number, "-o", "%N").strip()
        variables = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": names, "SLURM_JOB_NUM_NODES": str(nodes)}
        variables |= {"SLURM_JOB_CPUS_PER_NODE": f"8(x{nodes})", "SLURM_GPUS_ON_NODE": "2"}
        # of the step in which the Lab itself would run: nothing of it may reach the steps
        yield variables | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_CPU_BIND": "none"}
        slurm.client("scancel", number)


@pytest.fixture
def inside(allocation, cluster, project, monkeypatch):
    """This test runs inside the job, and leaves no step to the next one."""
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    yield allocation
    for step in steps(allocation):
        slurm.run("scancel", step)
    until(lambda: steps(allocation) == [])


def steps(inside):
    return slurm.client("squeue", "-h", "-s", "-j", inside["SLURM_JOB_ID"], "-o", "%i").split()


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_is_a_step_of_the_job_around_it(inside, launcher, capsys):
    nodes = int(inside["SLURM_JOB_NUM_NODES"])
    job = submit(spec(program="allreduce.py", nodes=nodes, launcher=launcher), STEPS)
    assert job.result(timeout=120)["sum"] == sum(range(2 * nodes))
    assert len(job.result()["hosts"]) == nodes
    assert job.where == f"job {inside['SLURM_JOB_ID']}"
    assert capsys.readouterr().out == (
        f"toy runs as a step of job {inside['SLURM_JOB_ID']}, which runs this notebook (process {job.id})\n"
    )
    assert attach("runs/toy").state == "done"
    queued = slurm.client("squeue", "-h", "-o", "%i %j").splitlines()
    assert not any(row.endswith(" toy") for row in queued)
    assert (job.out / "job.sbatch").exists()  # to keep, though nothing read it here


def test_two_steps_at_once_do_not_meet_each_other(inside):
    jobs = [submit(spec(program="allreduce.py", out=f"runs/{name}", **NO_GPUS), STEPS) for name in "ab"]
    assert [job.result(120)["sum"] for job in jobs] == [1, 1]


def test_a_step_can_be_warned_and_cancelled_and_leaves_nothing(inside, cluster, project):
    warned = submit(spec("sleep", out="runs/warned", **NO_GPUS), STEPS)
    cancelled = submit(spec("sleep", out="runs/cancelled", **NO_GPUS), STEPS)
    for job in (warned, cancelled):
        worker_jobs.sleepers(job.out, 2)
    assert len(steps(inside)) == 2
    warned.warn()
    assert warned.wait(30) == "stopped"
    cancelled.cancel()
    assert cancelled.state == "cancelled"
    until(lambda: steps(inside) == [])
    until(lambda: not any({"runs/warned", "runs/cancelled"} & set(words) for words in processes_of(cluster)))


def processes_of(cluster):
    """The command lines of all processes that know the cluster's configuration."""
    processes = psutil.process_iter(["cmdline", "environ"])
    return [p.info["cmdline"] or [] for p in processes if str(cluster.folder) in str(p.info["environ"])]


def test_a_second_step_on_the_gpus_waits_for_the_first(inside, project):
    first = submit(spec("sleep"), STEPS)
    until(lambda: steps(inside))
    with pytest.raises(UserError, match="step .* of job .* may use its GPUs"):
        submit(spec(out="runs/second"), STEPS)
    first.cancel()
    until(lambda: steps(inside) == [])
    assert submit(spec(out="runs/second"), STEPS).wait(60) == "done"


def test_a_step_ends_before_the_job_around_it(inside, project, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 12))
    job = submit(spec("sleep", **NO_GPUS, signal="USR1@10"), STEPS)
    assert job.wait(60) in ("stopped", "timeout") and job.run_time < 14


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 3, "processes_per_node": 1}, "Only allocated|nodes"),
        ({"processes_per_node": 1, "cpus_per_process": 9}, "More processors requested than permitted"),
    ],
    ids=str,
)
def test_what_the_job_does_not_hold_is_refused_in_slurms_words(inside, changes, words):
    job = submit(spec(**changes), STEPS)
    with pytest.raises(JobFailed, match=f"srun: error: .*({words})"):
        job.result(30)


def test_the_other_word_queues_a_job_of_its_own(inside):
    job = submit(spec(), dataclasses.replace(STEPS, inside_a_job="queue"))
    assert (job.where, job.wait(60)) == ("cluster throwaway", "done")
    assert job.id != inside["SLURM_JOB_ID"]
