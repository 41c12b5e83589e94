"""Jobs on this machine: nothing of them survives, whoever dies; and what a run's folder may hold. See test_jobs.py."""

import json
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from worker_jobs import PROGRAMS, all_gone, attach, ran, sleepers, spec, stand_in

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, local_job, submit
from mpdemo.jobs.job import write_record
from mpdemo.world import warm
from mpdemo.world.devices import gpus_here

pytestmark = pytest.mark.usefixtures("no_slurm")
OWNER = """
import pathlib, sys; sys.path[:0] = [{source!r}, {tests!r}]
from mpdemo import paths, jobs
import worker_jobs
paths.root = lambda: pathlib.Path({project!r})
jobs.submit(worker_jobs.spec("sleep", processes_per_node=2)).wait(100)
"""


def owner(project):
    """A Python that submits a job and then waits, as a notebook's kernel does."""
    code = OWNER.format(source=str(paths.source()), tests=str(PROGRAMS.parent), project=str(project))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("gpus", "visible", "devices", "used"),
    [
        (0, None, 2, True),
        (1, None, 1, False),
        (2, None, 1, True),
        (2, None, 2, True),
        (4, "0,2", 3, False),
        (2, "-1", 1, True),
    ],
)
def test_gpus_are_used_where_each_device_has_one_and_two_can_be_compared(
    gpus, visible, devices, used, project, monkeypatch, capsys, request
):
    """The GPUs are listed by a program in place of the driver's."""
    stand_in(project / "nvidia-smi", f'for n in $(seq {gpus}); do echo "GPU $n: a GPU (UUID: $n)"; done')
    monkeypatch.setenv("PATH", f"{project}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    request.addfinalizer(gpus_here.cache_clear)
    gpus_here.cache_clear()
    print_them = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES') != '')"
    job = ran(JobSpec("toy", ("-c", print_them), "runs/toy", gpus_per_process=devices))
    assert job.log() == f"{used}\n"
    here = len(visible.split(",")) if visible else gpus
    said = f"on CPU cores: {max(2, devices)} GPUs wanted, {here} here" in capsys.readouterr().out
    assert said == (here > 0 and not used)


def test_a_warning_waits_until_the_processes_know_it(project):
    job = submit(spec("sleep", processes_per_node=2))
    job.warn()  # they still start, and would die of it
    assert job.wait(60) == "stopped"


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_nothing_survives_the_kernel(project, sign):
    kernel = owner(project)
    pids = sleepers(project / "runs/toy", 2)
    server, *_ = [process.pid for process in psutil.Process(kernel.pid).children()]
    assert (project / "runs/toy/processes.txt").read_text().split() == [str(pid) for pid in pids[::2]]
    assert attach("runs/toy").state == "running"
    os.kill(kernel.pid, sign)
    kernel.wait(10)
    assert all_gone([server, *pids])
    job = attach("runs/toy")
    assert job.wait(20) == "cancelled"
    assert "ended with the Python that had started it" in job.reason


def test_a_killed_supervisor_is_reported_and_leaves_no_rank(project):
    job = submit(spec("sleep", processes_per_node=2))
    pids = sleepers(project / "runs/toy", 2)
    _, scratch = local_job.STARTED[local_job._key(job.record)]
    os.kill(int(job.id), signal.SIGKILL)
    assert attach("runs/toy").wait(20) == "cancelled" and not scratch.exists()  # by the Python that made it
    assert job.wait(20) == "cancelled"
    assert "supervisor was killed" in job.reason
    assert all_gone(pids[::2])  # the ranks; nobody is left who could know of what they started themselves
    for pid in pids[1::2]:
        os.kill(pid, signal.SIGKILL)


def test_a_killed_server_is_replaced(project):
    ran(spec(out="runs/first"))
    for _, server in warm.SERVERS.values():
        server.kill()
        server.wait(10)
    ran(spec(out="runs/second"))


def test_ranks_that_stop_with_a_checkpoint_wait_for_each_other(project):
    code = "import os, sys, time; r = os.environ['RANK']; time.sleep(2 * int(r)); print('saved', r); sys.exit(3)"
    job = submit(JobSpec("toy", ("-c", code), "runs/toy", processes_per_node=2))
    assert job.wait(30) == "stopped" and "saved 1" in job.log()


@pytest.mark.parametrize(
    "code, status, last",
    [("raise SystemExit('bad')", 1, "bad"), ("import sys; sys.exit(7)", 7, ""), ("1/0", 1, "ZeroDivisionError: divisi"),
     ("import os; os.kill(os.getpid(), 9)", 137, ""), ("import atexit; atexit.register(print, 'bye')", 0, "bye")],
)  # fmt: skip
def test_a_forked_program_ends_like_one_of_its_own(project, code, status, last):
    job = submit(JobSpec("toy", ("-c", code), "runs/toy"))
    job.wait(60)
    assert (job.exit_status, job.log().strip().split("\n")[-1][:25]) == (status, last)
    assert "warm.py" not in job.log() and "runpy" not in job.log()


def test_lines_of_ranks_are_whole(project):
    """A rank's print is one write: text and end of line in two would let another rank's text come between them."""
    many = "import os; [print('rank', os.environ['RANK'], 'line', i) for i in range(3000)]"
    job = ran(JobSpec("toy", ("-c", many), "runs/toy", processes_per_node=2))
    assert sorted(job.log().splitlines()) == sorted(
        f"rank {rank} line {i}" for rank in range(2) for i in range(3000)
    )


def test_a_process_that_has_only_the_supervisors_number_is_not_it(project):
    job = submit(spec("sleep"))
    (job.out / "job.json").write_text(json.dumps(job.record | {"started": job.record["started"] - 1}))
    assert attach("runs/toy").state == "cancelled" and job.state == "running"
    job.cancel()


def test_a_damaged_record_and_none(project):
    (project / "runs/toy").mkdir(parents=True)
    (project / "runs/toy/job.json").write_text("{")
    with pytest.raises(UserError, match=r"job.json is damaged \(JSON.*\); do: remove it"):
        submit(spec(), resubmit=True)


def test_a_refused_submission_leaves_the_results_of_the_run_before(project, monkeypatch):
    job = ran(spec())
    (job.out / "checkpoints").mkdir()
    before = sorted(file.name for file in job.out.iterdir())
    monkeypatch.setattr(local_job, "start", lambda spec: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        submit(spec(), resubmit=True)
    assert sorted(file.name for file in job.out.iterdir()) == before
    assert attach("runs/toy").result()["processes"] == 1 and len(job.metrics()) == 3


def test_a_job_is_announced_before_its_record_is_written(project, capsys):
    """Where the disk is full, its number is all that one has of it."""
    (project / "runs/toy/job.json.part").mkdir(parents=True)
    with pytest.raises(OSError):
        submit(spec())
    assert "1 process (job" in capsys.readouterr().out


def test_of_two_kernels_that_submit_at_the_same_time_one_is_refused(project, monkeypatch):
    """The second would find no job yet, and its own would take the first one's results away."""
    refused, start = [], local_job.start

    def start_while_another_submits(wanted):
        with pytest.raises(
            UserError, match="another Python is submitting a job to runs/toy; do: wait"
        ) as error:
            submit(wanted)
        refused.append(error)
        return start(wanted)

    monkeypatch.setattr(local_job, "start", start_while_another_submits)
    ran(spec())
    assert len(refused) == 1


# --- several people on one installation: each works in a folder of their own, and nobody in another's


def test_the_root_is_the_folder_one_works_in(project, tmp_path, monkeypatch):
    monkeypatch.undo()
    (project / "notebooks").mkdir()
    monkeypatch.chdir(project / "notebooks")
    assert paths.root() == project
    monkeypatch.setenv("MPDEMO_ROOT", str(tmp_path / "other"))
    assert paths.root() == tmp_path / "other"


def test_the_job_of_another_user_is_neither_taken_nor_overwritten(project, monkeypatch):
    ran(spec())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match=r"runs/toy holds the job of another user .*MPDEMO_ROOT"):
        submit(spec())


def test_the_folder_of_a_job_that_cannot_be_asked_is_not_taken(project):
    job = ran(spec())
    (job.out / local_job.STATUS).unlink()
    write_record(job.out, job.record | {"host": "login2"})
    with pytest.raises(
        UserError, match="may still write to runs/toy: it was started on login2; do: give another out="
    ):
        submit(spec("sleep"))
    ran(spec(), resubmit=True)


def test_runs_may_lie_on_another_disk(project, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch" / "me"
    monkeypatch.setenv("MPDEMO_RUNS", str(scratch))
    ran(spec())
    assert (scratch / "toy" / "job.json").exists() and (project / "runs").is_symlink()
    shutil.rmtree(scratch)  # as a purge of old files does
    ran(spec())
    monkeypatch.setenv("MPDEMO_RUNS", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="MPDEMO_RUNS is .*elsewhere, but .*runs is there already; do: mv"):
        submit(spec(out="runs/other"))


# --- other variables that Python and PyTorch read as they start: another server, in place of the one that is there

PROGRAM = """
import os, sys, tempfile, torch
print(os.getcwd(), sys.argv, __name__, torch.get_num_threads(), os.environ.get("RANK"), end=" ")
print(os.environ["TORCH_SYMBOLIZE_MODE"], torch.cuda._is_in_bad_fork(), end=" ")
print(tempfile.mkdtemp().startswith(os.environ["TMPDIR"]))
"""


def test_a_forked_program_is_like_one_of_its_own(project, monkeypatch):
    """With its own folder for temporary files, although the server has asked for one, as PyTorch may."""
    (project / "sitecustomize.py").write_text("import tempfile; tempfile.gettempdir()")
    (project / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(project))
    monkeypatch.setenv("TORCH_SYMBOLIZE_MODE", "new")
    for words, name, launcher, rank in (
        (("program.py",), "program.py", None, None),
        # which tells a single process its place
        (("-m", "program"), f"{project}/program.py", "torchrun", 0),
    ):
        job = ran(JobSpec("toy", (*words, "a b"), f"runs/{launcher}", launcher=launcher))
        assert job.log() == f"{project} ['{name}', 'a b'] __main__ 1 {rank} new False True\n"


def test_a_pytorch_that_cannot_be_imported_says_why(project, monkeypatch):
    (project / "torch.py").write_text("raise ImportError('libtorch is damaged')")
    monkeypatch.setenv("PYTHONPATH", str(project))
    job = submit(JobSpec("toy", ("-c", "import torch"), "runs/toy"))
    assert job.wait(60) == "failed" and job.log().endswith("ImportError: libtorch is damaged\n")
