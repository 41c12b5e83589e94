"""What holds for a job wherever it runs: under a real Slurm, and on this machine without one."""

import pytest
from worker_jobs import all_gone, attach, ran, scontrol, sleepers, spec, until

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, JobSpec, submit

# no launcher has a say on this machine
LAUNCHED = [("slurm", "srun"), ("slurm", "torchrun"), ("here", None)]
SLURM_BY_NIGHT = pytest.mark.parametrize(
    "place", [pytest.param("slurm", marks=pytest.mark.nightly), "here"], indirect=True
)


@pytest.fixture(params=["slurm", "here"])
def place(request, project):
    """Where the jobs run; an empty project for them."""
    request.getfixturevalue("cluster" if request.param == "slurm" else "no_slurm")
    return request.param


def test_a_job_that_is_done_has_metrics_a_log_and_a_result(place, capsys):
    job = submit(spec(processes_per_node=2))
    said = {"slurm": "submitted toy to cluster throwaway: job {} (runs/toy/job.sbatch)\n",
            "here": "Slurm not found: toy runs on this machine, 2 processes (job {})\n"}  # fmt: skip
    assert capsys.readouterr().out == said[place].format(job.id)
    assert (job.wait(60), job.exit_status, job.queue) == ("done", 0, None)
    assert (
        job.where == {"slurm": "cluster throwaway", "here": "this machine"}[place]
        and 0 <= job.run_time < 60
    )
    assert "--ntasks-per-node" in (paths.root() / job.script).read_text()
    assert sorted(line.split(" on ")[0][-11:] for line in job.log().splitlines()) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
    assert [row["step"] for row in job.metrics()] == [1, 2, 3]
    assert job.result()["processes"] == 2
    with open(job.out / "metrics.jsonl", "a") as file:
        file.write('{"event": "st')  # half a line waits for the rest
    assert len(job.metrics()) == 3


def test_the_same_cell_again_finds_the_job(place, capsys):
    first = submit(spec())
    first.wait(60)
    again = submit(spec())
    assert (again.id, again.state) == (first.id, "done")
    assert "not submitted again; resubmit=True" in capsys.readouterr().out
    assert attach("runs/toy").id == first.id and attach("runs/toy").result()["processes"] == 1
    (first.out / "checkpoints").mkdir()
    anew = submit(spec(), resubmit=True)
    said = capsys.readouterr().out
    assert anew.id != first.id and "submitting a new one, because of resubmit=True" in said
    assert "checkpoints are kept in runs/toy/checkpoints.1" in said  # moved aside, not lost
    assert not (first.out / "checkpoints").exists() and (first.out / "checkpoints.1").exists()
    assert anew.wait(60) == "done"


def test_a_folder_is_busy_while_its_job_runs(place):
    first = submit(spec("sleep"))
    until(lambda: first.state == "running")
    with pytest.raises(UserError, match=f"job {first.id} .* is running and writes to runs/toy"):
        submit(spec("train"))
    with pytest.raises(TimeoutError, match=r"job \d+ \(toy\) is still running after 0.3 s; it runs on"):
        first.wait(0.3)
    first.cancel()
    assert first.wait(30) == "cancelled"
    ran(spec("train"))


@pytest.mark.parametrize(("place", "launcher"), LAUNCHED, indirect=["place"])
def test_a_failed_process_is_named_with_its_status_cause_and_log(place, launcher):
    job = submit(spec("fail", 1, 7, processes_per_node=2, launcher=launcher))
    with pytest.raises(
        JobFailed, match=f"job {job.id} .*: failed.*, exit status \\d+; log: {job.out}/"
    ) as told:
        job.result(90)
    assert job.state == "failed" and job.run_time < 50  # the other one would sleep for a minute
    assert launcher or job.exit_status == 7
    assert "ValueError: the digits are upside down\n" in str(told.value)
    process = {None: "rank 1 of 2 ended with exit status 7", "srun": "task 1: Exited with exit code 7"}
    assert process.get(launcher, "(exitcode: 7) local_rank: 1") in str(told.value)


def test_what_a_program_said_itself_is_shown_where_no_known_failure_is_in_the_log(no_slurm, project):
    job = submit(
        JobSpec(name="toy", command=("-c", "print('no data here'); raise SystemExit(1)"), out="runs/toy")
    )
    with pytest.raises(
        JobFailed,
        match=r"exit status 1; log: .*\nits last lines:\nno data here\nwhat it may be: mpdemo explain runs/toy$",
    ):
        job.result(60)


def test_cancel_ends_the_whole_tree(place):
    job = submit(spec("sleep", processes_per_node=2))
    pids = sleepers(job.out, 2)
    attach("runs/toy").cancel()  # as from another kernel
    assert job.wait(30) == "cancelled"
    assert place == "slurm" or all_gone(pids)


@SLURM_BY_NIGHT
def test_the_time_limit_and_the_warning_before_it(place):
    """Slurm looks at its jobs' limits every 30 s; so their ends are moved close, and one wait serves both."""
    limits = {"slurm": ("00:10:00", "00:10:00"), "here": ("00:00:03", "00:00:40")}[place]
    late = submit(spec("sleep", out="runs/late", time_limit=limits[0]))
    warned = submit(spec("sleep", out="runs/warned", time_limit=limits[1], signal="USR1@37"))
    if place == "slurm":
        for job, left in ((late, 5), (warned, 35)):
            until(lambda job=job: job.state == "running")
            scontrol("update", f"jobid={job.id}", f"EndTime=now+{left}")
    assert late.wait(100) == "timeout"
    assert warned.wait(100) == "stopped"
    assert place == "here" or "DUE TO TIME LIMIT" in late.log()


@pytest.mark.parametrize(
    ("place", "processes", "signal"),
    [("slurm", 1, None), ("slurm", 2, "USR1@60"), ("here", 2, None)],
    indirect=["place"],
)
def test_a_running_job_can_be_warned(place, processes, signal):
    job = submit(
        spec("sleep", processes_per_node=processes, signal=signal, launcher="torchrun" if signal else None)
    )
    pids = sleepers(job.out, processes)
    job.warn()
    assert job.wait(60) == "stopped"
    assert place == "slurm" or all_gone(pids)
    with pytest.raises(UserError, match="is stopped; only a running job can be warned"):
        job.warn()
