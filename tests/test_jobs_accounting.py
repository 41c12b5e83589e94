"""Slurm's accounting, where a cluster has it: what it refuses is explained, and it remembers every job."""

import pytest
from worker_jobs import spec, until

from mpdemo.cluster import Cluster
from mpdemo.errors import UserError
from mpdemo.jobs import Site, attach, check, slurm, submit
from mpdemo.jobs.site_trial import try_job

MINE = Site("mine", cores_per_node=4, account="course", qos="short", polling_seconds=1)


@pytest.fixture(scope="module")
def accounted(slurm_programs):
    wanted = {"accounts": ["course", "other"], "qos": ["short"], "urgent": ["urgent"]}
    with Cluster.up(nodes=1, cpus=4, gpus=0, network="none", wanted=wanted, owned=True) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def in_reach(accounted, project, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", accounted.environ["SLURM_CONF"])


@pytest.mark.parametrize(("word", "message"), [("account", "sacctmgr show assoc"), ("qos", "sacctmgr show qos")])
def test_an_account_or_qos_that_is_not_mine_is_refused_with_the_line_that_lists_mine(word, message):
    assert check(spec(), MINE) == []
    wrong = Site("mine", **{"cores_per_node": 4, "account": "course", "qos": "short"} | {word: "theirs"})
    with pytest.raises(UserError, match=message):
        submit(spec(), wrong)
    finding = try_job(wrong, "throwaway")
    assert not finding.ok and message in finding.text


def test_accounting_remembers_what_the_controller_would_forget(accounted):
    done = submit(spec(), MINE)
    failed = submit(spec("fail", 0, 7, out="runs/failed"), MINE)
    cancelled = submit(spec("sleep", out="runs/cancelled"), MINE)
    assert (done.wait(60), failed.wait(60)) == ("done", "failed")
    cancelled.cancel()
    assert cancelled.wait(60) == "cancelled"
    answers = [slurm.ask_accounting(job.id) for job in (done, failed, cancelled)]
    assert [answer.state for answer in answers] == ["done", "failed", "cancelled"]
    assert [answer.exit_status for answer in answers[:2]] == [0, 7]
    wanted = {f"{done.id}|COMPLETED", f"{failed.id}|FAILED"}  # slurmdbd's rows, some seconds later; no file has them
    until(lambda: wanted <= set(slurm.client("sacct", "-n", "-P", "-X", "-o", "JobID,State").splitlines()))
    assert slurm.ask_accounting("999999") is None


@pytest.mark.parametrize(("requeue", "state"), [(False, "cancelled"), (True, "done")])
def test_a_preempted_job_says_so_or_runs_again(requeue, state):
    job = submit(spec("sleep" if not requeue else "twice", cpus_per_process=4, requeue=requeue), MINE)
    until(lambda: job.state == "running" and (job.out / "pids-0").exists())
    options = ["--account=course", "--qos=short", "-p", "urgent", "-c", "4", "-o", "/dev/null", "--wrap=true"]
    slurm.client("sbatch", *options)
    assert job.wait(60) == state
    assert job.reason == ("" if requeue else "a more urgent job took its nodes")


def test_a_job_that_the_controller_has_forgotten_is_found_in_the_accounts(accounted, project):
    job = submit(spec("fail", 0, 7), MINE)
    assert job.wait(60) == "failed"
    until(lambda: "FAILED" in slurm.client("sacct", "-n", "-P", "-X", "-j", job.id, "-o", "State"))
    (project / "runs/toy/exit-status.txt").unlink()
    accounted.stop_controller()
    (accounted.folder / "state").rename(accounted.folder / "forgotten")
    (accounted.folder / "state").mkdir()
    (accounted.folder / "jobcomp.txt").unlink()
    accounted.start_controller()
    record = attach("runs/toy").record
    record.pop("final")
    again = type(job)(record, job.out)
    assert (again.state, again.exit_status) == ("failed", 7)
    assert "forgotten" not in again.reason
