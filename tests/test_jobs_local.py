"""The same Job on this machine: torchrun under a supervisor that leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worker_jobs import PROGRAMS, spec

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobFailed, attach, local_job, submit
from mpdemo.world.gpus import gpus_here
from mpdemo.world.processes import first_child, start_time

pytestmark = pytest.mark.usefixtures("no_slurm")


def sleepers(folder, count, seconds=30):
    """Wait until `count` workers sleep; return their process ids and their children's."""
    end = time.monotonic() + seconds
    while len(list(folder.glob("pids-*"))) < count or not all(f.read_text() for f in folder.glob("pids-*")):
        assert time.monotonic() < end, "the workers did not start"
        time.sleep(0.05)
    return [int(pid) for file in folder.glob("pids-*") for pid in file.read_text().split()]


def all_gone(pids, seconds=15):
    end = time.monotonic() + seconds
    while any(start_time(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if start_time(pid)] == []


def test_processes_meet_under_torchrun(project, capsys):
    job = submit(
        spec(program="allreduce.py", nodes=2, processes_per_node=2, oversubscribe=True), script="slurm/toy.sbatch"
    )
    assert "no Slurm in reach: toy runs on this machine, 4 processes under torchrun" in capsys.readouterr().out
    assert job.where == "this machine"
    assert job.result(120)["sum"] == 6.0
    assert "--nodes=2" in (project / "slurm" / "toy.sbatch").read_text()
    assert job.queue is None
    assert 0 < job.run_time < 120


def test_one_process_needs_no_launcher(project, capsys):
    job = submit(spec())
    assert "1 process (job" in capsys.readouterr().out
    assert job.result(60)["processes"] == 1
    assert [row["step"] for row in job.metrics()] == [1, 2, 3]
    assert job.log().startswith("rank 0 of 1")
    assert job.exit_status == 0


@pytest.fixture
def gpus(request, tmp_path, monkeypatch):
    """So many GPUs on this machine, listed by a program in place of the driver's."""
    driver = tmp_path / "bin/nvidia-smi"
    driver.parent.mkdir()
    driver.write_text(f'#!/bin/sh\nfor n in $(seq {request.param}); do echo "GPU $n: a GPU (UUID: $n)"; done\n')
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{driver.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    gpus_here.cache_clear()
    yield request.param
    gpus_here.cache_clear()


@pytest.mark.parametrize(
    ("gpus", "visible", "devices", "used"),
    [(0, None, 2, True), (1, None, 1, False), (2, None, 1, True), (2, None, 2, True), (4, "0", 1, False),
     (4, "0,2", 3, False)],
    indirect=["gpus"],
)  # fmt: skip
def test_gpus_are_used_where_each_device_has_one_and_two_can_be_compared(
    gpus, visible, devices, used, project, monkeypatch, capsys
):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    job = submit(spec(program="environ.py", gpus_per_process=devices))
    assert job.wait(60) == "done", job.log()
    (written,) = (project / "runs/toy").glob("tmp*.json")
    assert (json.loads(written.read_text()).get("CUDA_VISIBLE_DEVICES") != "") == used
    gpus_here = len(visible.split(",")) if visible else gpus
    said = f"on CPU cores: {max(2, devices)} GPUs wanted, {gpus_here} here" in capsys.readouterr().out
    assert said == (gpus_here > 0 and not used)


def test_torchrun_passes_arguments_on_as_they_are(project):
    texts = ["$$", "${local_rank}", "a$b", "$(touch oops)", " ", "", "-x", "--", "'", "é"]
    job = submit(spec("echo", *texts, processes_per_node=2))
    assert job.wait(60) == "done", job.log()
    assert json.loads((project / "runs/toy/echo.json").read_text()) == texts


def test_half_a_line_of_metrics_waits(project):
    job = submit(spec())
    job.wait(60)
    with open(project / "runs/toy/metrics.jsonl", "a") as file:
        file.write('{"event": "st')
    assert len(job.metrics()) == 3
    with open(project / "runs/toy/metrics.jsonl", "a") as file:
        file.write("\nnonsense\n")  # by whatever; the rest of the file stays readable
    assert len(job.metrics()) == 3


def test_the_same_cell_again_finds_the_job(project, capsys):
    first = submit(spec())
    first.wait(60)
    again = submit(spec())
    assert (again.id, again.state) == (first.id, "done")
    assert "not submitted again" in capsys.readouterr().out
    assert attach("runs/toy").result()["processes"] == 1
    assert submit(spec(), resubmit=True).id != first.id


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failed_process_is_named(project, processes):
    job = submit(spec("fail", processes - 1, 7, processes_per_node=processes))
    who = "the job" if processes == 1 else "rank 1"
    with pytest.raises(JobFailed, match=f"{who} failed with exit status 7") as caught:
        job.result(60)
    assert job.state == "failed"
    # the other process prints its one line at any moment
    assert "ValueError: the digits are upside down" in caught.value.failure.lines[-processes:]


@pytest.mark.parametrize("processes", [1, 2])
def test_cancel_ends_the_whole_tree(project, processes):
    job = submit(spec("sleep", processes_per_node=processes))
    pids = sleepers(project / "runs/toy", processes)
    assert job.state == "running"
    job.cancel()
    assert job.state == "cancelled"
    assert all_gone(pids)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_time_limit_ends_it(project, processes):
    job = submit(spec("sleep", processes_per_node=processes, time_limit=f"00:00:0{1 + 3 * processes}"))
    assert job.wait(60) == "timeout"
    assert all_gone(sleepers(project / "runs/toy", 0))


def test_the_warning_before_the_limit_lets_it_stop(project):
    job = submit(spec("sleep", time_limit="00:00:40", signal="USR1@37"))
    assert job.wait(60) == "stopped"
    assert job.run_time < 30


def test_a_running_job_can_be_warned(project):
    job = submit(spec("sleep"))
    pids = sleepers(project / "runs/toy", 1)
    job.warn()
    assert job.wait(60) == "stopped"
    assert all_gone(pids)
    with pytest.raises(UserError, match="is stopped; only a running job can be warned"):
        job.warn()


@pytest.mark.parametrize("before_the_limit", [None, "USR1@60"])
def test_torchrun_passes_the_warning_on(project, before_the_limit):
    job = submit(spec("sleep", processes_per_node=2, signal=before_the_limit))
    pids = sleepers(project / "runs/toy", 2)
    job.warn()
    assert job.wait(60) == "stopped"
    assert all_gone(pids)


def test_a_warning_waits_until_torchrun_can_pass_it_on(project):
    job = submit(spec("sleep", processes_per_node=2))
    while not first_child(int(job.id)):
        assert job.state == "running"
    job.warn()  # torchrun still imports PyTorch, and would die of it
    assert job.wait(60) == "stopped"


OWNER = """
import sys; sys.path.insert(0, {root!r})
from mpdemo import paths, jobs
import pathlib, time
paths.root = lambda: pathlib.Path({project!r})
spec = jobs.JobSpec(name="toy", command=({worker!r}, "runs/toy", "sleep"), out="runs/toy", processes_per_node=2)
job = jobs.submit(spec)
time.sleep(60)
"""


def owner(project):
    """A Python that submits a job and then waits, as a notebook's kernel does."""
    code = OWNER.format(
        root=str(paths.__file__.rsplit("/", 2)[0]), project=str(project), worker=str(PROGRAMS / "worker.py")
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_kernel(project, sign):
    kernel = owner(project)
    pids = sleepers(project / "runs/toy", 2)
    assert attach("runs/toy").state == "running"
    os.kill(kernel.pid, sign)
    kernel.wait(10)
    assert all_gone(pids)
    job = attach("runs/toy")
    assert job.wait(20) == "cancelled"
    assert "ended with the Python that had started it" in job.reason


def test_a_job_of_another_kernel_can_be_cancelled(project):
    kernel = owner(project)
    pids = sleepers(project / "runs/toy", 2)
    job = attach("runs/toy")
    job.cancel()
    assert job.wait(20) == "cancelled"
    assert all_gone(pids)
    kernel.kill()
    kernel.wait(10)


def test_a_process_that_only_has_the_supervisors_number_is_not_it(project):
    job = submit(spec("sleep"))
    assert attach("runs/toy").state == "running"
    record = json.loads((project / "runs/toy/job.json").read_text())
    for other in (record | {"started": record["started"] - 1}, {**record, "started": None}, {"id": record["id"]}):
        assert not local_job.supervisor_lives(other)
    job.cancel()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_supervisor_is_reported_and_leaves_no_rank(project, processes):
    job = submit(spec("sleep", processes_per_node=processes))
    pids = sleepers(project / "runs/toy", processes)
    os.kill(int(job.id), signal.SIGKILL)
    assert job.wait(20) == "cancelled"
    assert "supervisor was killed" in job.reason
    assert not Path(job.record["scratch"]).exists()
    assert all_gone(pids[::2])  # the ranks; nobody is left who could know of what they started themselves
    for pid in pids[1::2]:
        os.kill(pid, signal.SIGKILL)


def test_no_files_are_left_in_the_temporary_folder(project, monkeypatch):
    scratch = project / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    job = submit(spec("sleep", processes_per_node=2))
    sleepers(project / "runs/toy", 2)
    assert list(scratch.iterdir())
    job.cancel()
    assert list(scratch.iterdir()) == []


def test_waiting_is_bounded(project):
    job = submit(spec("sleep"))
    with pytest.raises(TimeoutError, match=r"job \d+ \(toy\) is still running after 0.3 s"):
        job.wait(0.3)
    job.cancel()


def test_no_job_in_a_folder(project):
    with pytest.raises(UserError, match="no job in runs/none"):
        attach("runs/none")


def test_a_damaged_record(project):
    submit(spec()).wait(60)
    (project / "runs/toy/job.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        submit(spec())
    assert submit(spec(), resubmit=True).wait(60) == "done"


def test_a_refused_submission_leaves_the_results_of_the_run_before(project):
    job = submit(spec())
    assert job.wait(60) == "done"
    (job.out / "checkpoints").mkdir()
    before = sorted(file.name for file in job.out.iterdir())
    with pytest.raises(UserError, match="below the project's root"):
        submit(spec(), script="/etc/toy.sbatch", resubmit=True)
    assert sorted(file.name for file in job.out.iterdir()) == before
    assert attach("runs/toy").result()["processes"] == 1 and len(job.metrics()) == 3


def test_a_job_is_announced_before_its_record_is_written(project, capsys):
    """Where the disk is full, its number is all that one has of it."""
    (project / "runs/toy/job.json.part").mkdir(parents=True)
    with pytest.raises(OSError):
        submit(spec())
    assert "1 process (job" in capsys.readouterr().out


def test_jobs_do_not_import_pytorch():
    code = "import sys, mpdemo.jobs, mpdemo.doctor; sys.exit(bool({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=paths.root()).returncode == 0


def test_an_earlier_runs_checkpoints_are_moved_aside_not_lost(project, no_slurm, capsys):
    """Submitting again must neither overwrite checkpoints nor end in the training's refusal to do so."""
    first = spec()
    assert submit(first).wait(60) == "done"
    checkpoints = paths.root() / first.out / "checkpoints"
    for kept in ("checkpoints.1", "checkpoints.2"):
        checkpoints.mkdir()
        (checkpoints / "step-000001.pt").write_text(kept)
        assert submit(first, resubmit=True).wait(60) == "done"
        assert not checkpoints.exists()
        assert (checkpoints.with_name(kept) / "step-000001.pt").read_text() == kept
    assert f"kept in {first.out}/checkpoints.2" in capsys.readouterr().out


def test_a_foreign_record_deletes_nothing(project, tmp_path):
    """A job's record may have been written by anybody; only our own temporary folders are removed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    job = submit(spec())
    job.wait(60)
    record = json.loads((project / "runs/toy/job.json").read_text()) | {"scratch": str(precious), "started": 1.0}
    (project / "runs/toy/job.json").write_text(json.dumps(record))
    (project / "runs/toy/exit-status.json").unlink()
    assert attach("runs/toy").state == "cancelled" and precious.exists()
