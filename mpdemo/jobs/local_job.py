"""How `mpdemo.jobs.job.Job` asks, cancels and warns a job on this machine, and how one is started.

The same command in as many processes, or the job's file as a step of the job around us (`mpdemo.jobs.allocation`),
watched by a supervisor (`mpdemo.world.supervisor`). The job ends with the Python, the notebook's kernel, that began it.
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
from mpdemo.jobs.record import read_text
from mpdemo.jobs.slurm_answers import Answer
from mpdemo.world import supervisor, warm
from mpdemo.world.devices import ON_THE_CPU, too_few_gpus
from mpdemo.world.processes import child_environment, first_child, is_running, start_time

PATIENCE = 0.05  # s between two looks at a job
PREFIX = "mpdemo-"  # of the folder for temporary files
GRACE = 5.0  # s between the request to end and the kill
LOG = "log.txt"
STATUS = "exit-status.json"
RANKS = "processes.txt"  # the number of each rank's process, a line each
PIPES = {}  # run's folder -> the pipe whose end ends its job; open as long as this Python lives, or until that end
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
    ended = not supervisor_lives(job.record)
    # read after the question: once it has ended, the file is complete
    if answer := answer_at_the_end(job.out):
        PIPES.pop(str(job.out), None)
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


def start(spec, site) -> dict:
    """Start a job's processes under a supervisor; return what the job's record holds of them."""
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))  # short: sockets are made below it
    out = paths.root() / spec.out
    order = {"cwd": str(paths.root()), "status": str(out / STATUS), "ranks": str(out / RANKS), "grace": GRACE}
    order |= {"name": spec.name, "signal": spec.signal, "scratch": str(scratch), "limit": times.limit(spec.time_limit)}
    around = allocation.surrounding_job(site)
    if around:
        order["command"] = ["bash", *["-l"] * site.login_shell, "-c", allocation.step_text(spec, site)]
        order["environment"] = allocation.step_environment(spec, site)
        order["limit"] = min(order["limit"], allocation.seconds_left())
    else:
        order |= {"command": spec.command, "processes": spec.world_size, "environment": environment_here(spec, scratch)}
    (scratch / "order.json").write_text(json.dumps(order))
    try:
        pid, PIPES[str(out)] = supervise(scratch / "order.json", out / LOG, cold=bool(around))
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(f"cannot start a job here: {error}") from None
    record = {"id": pid, "started": start_time(pid), "identity": None}
    return record | {"host": platform.node(), "scratch": str(scratch)}


def supervise(order, log, cold) -> tuple[int, object]:
    """Start a supervisor; return its number, and the pipe whose end tells it that this Python has ended.

    It is forked from a process that has PyTorch, or, where a job's own processes start elsewhere, begins cold.
    """
    watched, pipe = os.pipe()
    with open(log, "wb") as file, open(watched) as stdin:
        if not cold:
            return warm.supervise(order, stdin.fileno(), file.fileno()), open(pipe, "wb")
        command = [sys.executable, "-SP", supervisor.__file__, str(order)]
        process = subprocess.Popen(command, stdin=stdin, stdout=file, stderr=file, start_new_session=True)
        return process.pid, open(pipe, "wb")


def environment_here(spec, scratch) -> dict:
    """Return the processes' environment: no launcher and no Slurm job around them, one thread each.

    Where the GPUs are too few, their devices are CPU cores.
    """
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)}
    return child_environment() | own | (ON_THE_CPU if too_few_gpus(spec.devices) else {})
