"""How `mpdemo.jobs.job.Job` asks, cancels and warns a job on this machine, and how one is started.

The same command under torchrun, or the job's file as a step of the job around us (`mpdemo.jobs.allocation`); a
supervisor watches it, so that nothing outlives it. The job ends with the Python (the notebook's kernel) that started
it.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import allocation, diagnose, times
from mpdemo.jobs.launch_text import torchrun_signals
from mpdemo.jobs.record import read_text
from mpdemo.jobs.slurm_answers import Answer
from mpdemo.world.gpus import ON_THE_CPU, too_few_gpus
from mpdemo.world.launch import torchrun_arguments
from mpdemo.world.processes import child_environment, first_child, is_running, start_time

PATIENCE = 0.05  # s between two looks at a job
PREFIX = "mpdemo-"  # of the folder for temporary files
GRACE = 5.0  # s between the request to end and the kill
LOG = "log.txt"
STATUS = "exit-status.json"
ORPHANED = "it ended with the Python that had started it"
# How the supervisor ended a job -> state and reason.
ENDS = {"cancelled": ("cancelled", ""), "orphaned": ("cancelled", ORPHANED), "timeout": ("timeout", "TimeLimit")}


def log_files(job) -> list[Path]:
    """Return the one file that holds what the job prints."""
    return [job.out / LOG]


def cancel(job):
    """Let the supervisor end the job, and wait until it has done so."""
    end = time.monotonic() + GRACE + 6
    if supervisor_lives(job.record):
        os.kill(int(job.id), signal.SIGTERM)
    while ask(job).state == "running":
        if time.monotonic() > end:
            raise TimeoutError(f"job {job.id} ({job.name}) does not end; do: kill -9 {job.id}")
        time.sleep(PATIENCE)


def warn(job):
    """Send SIGUSR1 to the supervisor, which passes it on."""
    end = time.monotonic() + GRACE
    while not first_child(int(job.id)) and supervisor_lives(job.record) and time.monotonic() < end:
        time.sleep(PATIENCE)  # it does not listen yet
    os.kill(int(job.id), signal.SIGUSR1)


def ask(job) -> Answer:
    """Return what is known of the job: its end as its supervisor wrote it, else whether that supervisor lives."""
    if job.process:
        job.process.poll()  # takes its exit status: no zombie stays
    ended = not supervisor_lives(job.record)
    # read after the question: once it has ended, the file is complete
    if answer := answer_at_the_end(job.out):
        return answer
    if job.record.get("host", platform.node()) != platform.node():
        return Answer("unknown", f"it was started on {job.record['host']}")
    if ended:
        scratch = Path(job.record["scratch"])
        if scratch.parent == Path(tempfile.gettempdir()) and scratch.name.startswith(PREFIX):
            shutil.rmtree(scratch, ignore_errors=True)  # never another folder: the record may be anybody's
        return Answer("cancelled", "its supervisor was killed")
    return Answer("running", "", None, time.time() - job.record["submitted"])


def answer_at_the_end(out) -> Answer | None:
    """Return how a job ended, as its supervisor wrote it; None while it runs: only then is its long log not read."""
    text = read_text(out / STATUS)
    if not text:
        return None
    end = json.loads(text)
    status = end["exit_status"]
    state, reason = ENDS.get(end["how"]) or (diagnose.state_by_status(read_text(out / LOG), status), "")
    return Answer(state, reason, status, end["run_time"])


def supervisor_lives(record) -> bool:
    """Whether the supervisor of a record is alive; a process of its number that started at another time is not it."""
    return is_running(int(record["id"]), record.get("started"))


def start(spec, site) -> tuple[dict, subprocess.Popen]:
    """Start a job's processes; return what the job's record holds of them, and their supervisor."""
    scratch = tempfile.mkdtemp(prefix=PREFIX)  # short: sockets are made below it
    limit = times.limit(spec.time_limit)
    if allocation.surrounding_job(site):
        command = ["bash", *["-l"] * site.login_shell, "-c", allocation.step_text(spec, site)]
        environment, launcher = allocation.step_environment(spec, site), "srun"
        limit = min(limit, allocation.seconds_left())
    else:
        command, launcher = command_here(spec)
        environment = environment_here(spec, scratch)
    order = {"command": command, "status": str(paths.root() / spec.out / STATUS), "limit": limit, "grace": GRACE}
    order |= {"signal": spec.signal, "launcher": launcher, "scratch": scratch}
    try:
        process = supervise(order, environment, paths.root() / spec.out / LOG)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(f"cannot start a job here: {error}") from None
    record = {"id": process.pid, "started": start_time(process.pid), "identity": None}
    return record | {"host": platform.node(), "scratch": scratch}, process


def supervise(order, environment, log) -> subprocess.Popen:
    """Start a supervisor with its order, in a session of its own."""
    command = [sys.executable, "-S", str(Path(__file__).with_name("supervisor.py")), json.dumps(order)]
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with open(log, "wb") as file:
        return subprocess.Popen(
            command, **streams, stdout=file, env=environment, cwd=paths.root(), start_new_session=True
        )


def command_here(spec) -> tuple[list[str], str]:
    """Return the command that starts the job's processes here, and its launcher: a single process needs none."""
    if spec.world_size == 1:
        return [sys.executable, "-u", *spec.command], ""
    torchrun = torchrun_arguments(spec.command, spec.world_size)
    return [sys.executable, "-m", "torch.distributed.run", *torchrun], "torchrun"


def environment_here(spec, scratch) -> dict:
    """Return the processes' environment: no launcher and no Slurm job around them, one thread each.

    Where the GPUs are too few, their devices are CPU cores.
    """
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": scratch}
    return child_environment() | own | torchrun_signals(spec) | (ON_THE_CPU if too_few_gpus(spec.devices) else {})
