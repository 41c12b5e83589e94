"""Jobs on a real Slurm: what only a queue and a controller can do to them. See test_jobs.py."""

import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from project import bash_blocks
from worker_jobs import attach, ended, scontrol, spec, stand_in, until

from mpdemo.jobs import JobFailed, JobSpec, SlurmError, load_site, slurm, slurm_job, submit
from mpdemo.tools.cluster.cluster import Cluster


def rows(job, event="step") -> list[dict]:
    """What a training run has noted of an event."""
    return [row for row in job.metrics() if row["event"] == event]


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Put a shell script before the client of Slurm that has its name: client("sacct", script)."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return lambda name, script: stand_in(tmp_path / "bin" / name, script)


@pytest.fixture
def own_cluster(slurm_programs, monkeypatch):
    """A cluster to break things on."""
    with Cluster.up(nodes=2) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
        yield cluster


def test_a_waiting_job_knows_its_place_and_reason(own_cluster, project):
    blocker = submit(spec("sleep", out="runs/blocker", nodes=2, processes_per_node=4))
    until(lambda: blocker.state == "running")
    waiting = [submit(spec(out=f"runs/{i}", processes_per_node=4)) for i in range(2)]
    until(lambda: all(job.reason in ("Resources", "Priority") for job in waiting))
    assert [job.state for job in waiting] == ["pending", "pending"]
    until(lambda: [job.queue for job in waiting] == [1, 2])
    with pytest.raises(TimeoutError, match=r"still pending \(.*\) after 0.2 s; it runs on"):
        waiting[1].wait(0.1, pending=0.2)
    waiting[0].cancel()
    assert waiting[0].wait(30) == "cancelled"
    blocker.cancel()
    assert blocker.wait(30) == "cancelled"
    assert waiting[1].wait(60) == "done"
    assert waiting[1].queue is None


# --- troubles


@pytest.mark.nightly
def test_out_of_memory(slurm_programs, project, monkeypatch):
    with Cluster.up(nodes=1, cpus=10, memory=1000) as small:
        monkeypatch.setenv("SLURM_CONF", small.environ["SLURM_CONF"])
        program = "data = b'x' * 1_500_000_000; import time; time.sleep(30)"
        job = submit(JobSpec(name="big", command=("-c", program), out="runs/big", cpus_per_process=2))
        assert job.wait(60) == "out_of_memory", job.log()


@pytest.mark.nightly
def test_a_node_that_dies(own_cluster, project):
    job = submit(spec("sleep"))
    until(lambda: job.state == "running" and (project / "runs/toy/pids-0").exists())
    own_cluster.kill_node("node1")
    scontrol("update", "nodename=node1", "state=down", "reason=power")
    assert job.wait(60) == "node_failure"
    with pytest.raises(JobFailed, match="node_failure"):
        job.result()
    own_cluster.start_node("node1")
    until(lambda: slurm.client("sinfo", "-h", "-n", "node1", "-o", "%T").strip() == "idle")


def test_followed_jobs_ask_slurm_once_per_interval_however_many_they_are(
    cluster, project, tmp_path, client
):
    jobs = [submit(spec("sleep", out=f"runs/{i}")) for i in range(4)]
    until(lambda: all(job.state == "running" for job in jobs))
    time.sleep(jobs[0].polling_seconds)  # the next listing has them all
    calls, programs = tmp_path / "calls", {name: shutil.which(name) for name in ("squeue", "scontrol")}
    for name, program in programs.items():
        client(name, f'echo {name} >> {calls}\nexec {program} "$@"')
    begin = time.monotonic()
    with ThreadPoolExecutor(len(jobs)) as threads:  # live views look from threads
        while not calls.exists() or len(calls.read_text().split()) < 3:
            assert list(threads.map(lambda job: job.state, jobs)) == ["running"] * 4
            time.sleep(0.05)
    intervals = (time.monotonic() - begin) / jobs[0].polling_seconds
    assert set(calls.read_text().split()) == {"squeue"}
    assert len(calls.read_text().split()) <= intervals + 1
    for job in jobs:
        job.cancel()


@pytest.mark.soak
def test_jobs_go_on_while_the_controller_does_not_answer(own_cluster, project):
    job = submit(spec("sleep"))
    until(lambda: job.state == "running")
    until(lambda: slurm_job.own_job(job, 0.1)[0])
    own_cluster.end("slurmctld")
    started = time.monotonic()
    until(lambda: "Slurm does not answer, last seen running" in job.reason)
    assert job.state == "running" and attach("runs/toy").state == "running"
    with pytest.raises(SlurmError, match="; try again later$"):
        submit(spec(out="runs/other"), site="generic")
    assert time.monotonic() - started < 45
    own_cluster.start_controller()
    until(lambda: job.state == "running")
    job.cancel()
    assert job.wait(30) == "cancelled"


@pytest.mark.nightly
def test_jobs_that_slurm_has_forgotten(own_cluster, project):
    """Absence is not success: the log and the script's marker decide, else the state is unknown."""
    ends = {"good": ("train",), "bad": ("fail", 0, 9), "gone": ("train",), "ended": ("sleep",)}
    jobs = {name: submit(spec(*action, out=f"runs/{name}", name=name)) for name, action in ends.items()}
    until(lambda: (project / "runs/ended/pids-0").exists())
    subprocess.run(["scancel", jobs["ended"].id], check=True)
    for job in jobs.values():
        ended(job.id)
    (project / "runs/gone/exit-status.txt").unlink()
    own_cluster.end("slurmctld")
    for file in ("job_state", "job_state.old"):
        (own_cluster.folder / "state" / file).unlink(missing_ok=True)
    own_cluster.start_controller()
    assert slurm_job.look_up(jobs["good"].id) is None
    attached = {name: attach(f"runs/{name}") for name in ends}
    states = {"good": "done", "bad": "failed", "gone": "unknown", "ended": "cancelled"}
    assert {name: job.state for name, job in attached.items()} == states
    assert attached["bad"].exit_status == 9
    with pytest.raises(JobFailed, match="forgotten"):
        attached["gone"].result()


def test_accounting_remembers_what_the_controller_has_forgotten(cluster, client):
    """The throw-away Slurm has no accounting, so its words come from a script."""
    assert slurm_job.look_up("999999") is None
    client("sacct", "echo 'CANCELLED by 1000|0:0|00:00:07'")
    answer = slurm_job.look_up("999999")
    assert (answer.state, answer.run_time) == ("cancelled", 7.0)


@pytest.mark.nightly
def test_another_cluster_with_the_same_job_number_is_not_mixed_up(
    cluster, project, slurm_programs, monkeypatch
):
    job = submit(spec("fail", 0, 9))
    job.wait(60)
    with Cluster.up(nodes=1) as other:
        monkeypatch.setenv("SLURM_CONF", other.environ["SLURM_CONF"])
        anew = submit(spec("fail", 0, 9))
        assert anew.record["identity"] != job.record["identity"]
        assert anew.wait(60) == "failed"
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    assert attach("runs/toy").state == "failed"


def test_the_lines_of_56_stage_data_on_each_node_and_remove_the_copy(
    cluster, project, tmp_path, monkeypatch
):
    """Also where the program fails."""
    (disk := tmp_path / "disk").mkdir()
    monkeypatch.setenv("TMPDIR", str(disk))
    (project / "data/cats").mkdir(parents=True)
    (project / "data/cats/1.txt").write_text("a cat")
    (project / "train.py").write_text(
        "import os; print(open(os.environ['DATA'] + '/cats/1.txt').read()); raise SystemExit(7)"
    )
    (block,) = (block for block in bash_blocks("56_streams") if block.startswith("export DATA="))
    (project / "staged.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=log\n{block}"
    )
    done = subprocess.run(["sbatch", "--wait", "staged.sbatch"], cwd=project, env=os.environ, timeout=60)
    log = (project / "log").read_text()
    assert done.returncode == 7 and log.count("a cat") == 2, log
    until(lambda: not list(disk.iterdir()), 10)
    assert (project / "data/cats/1.txt").exists()


def test_an_old_job_object_leaves_the_newer_record_alone(cluster, project):
    old = submit(spec())
    assert ended(old.id) == "done"
    new = submit(spec(), resubmit=True)
    assert old.wait(60) == "done"
    assert attach("runs/toy").id == new.id
    new.wait(60)


# --- refusals


def test_slurms_refusal_is_shown(cluster, project):
    with pytest.raises(
        SlurmError, match="Invalid generic resource|Requested node configuration is not available"
    ):
        throwaway = load_site("throwaway")
        submit(spec(), site=replace(throwaway, text=throwaway.text.replace("gpu:", "gpu:tpu:")))
    assert not (project / "runs/toy/job.json").exists()


def test_a_controller_that_goes_while_it_answers_is_one_short_line(client):
    """What scontrol of Slurm 22.05 prints then, with status 1: no moment of a real one can be met on purpose."""
    shown = "Configuration data as of now\nClusterName = x\n\nSlurmctld(primary) at vm is DOWN\n****\n** RESTORE ***\n"
    client("scontrol", f"cat <<'END'\n{shown}END\nexit 1")
    with pytest.raises(slurm.NoAnswer, match="is DOWN") as refusal:
        slurm.configuration()
    assert "ClusterName" not in str(refusal.value) and "*" not in str(refusal.value)


@pytest.mark.timeout(15, func_only=True)
def test_a_configuration_that_is_missing_is_reported_at_once(slurm_programs, project, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    with pytest.raises(SlurmError, match="no such file"):
        submit(spec())


def test_a_job_inside_a_job_is_not_confused_by_the_outer_one(cluster, project, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "1000")
    monkeypatch.setenv("SBATCH_CONSTRAINT", "moon")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert submit(spec(processes_per_node=2)).result(60)["processes"] == 2
