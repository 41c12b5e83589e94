"""How `mpdemo.jobs.job.Job` asks, cancels and warns a job on this machine, and how one is started.

The same command in as many processes, watched by a supervisor (`mpdemo.world.supervisor`). The job ends with the
Python, the notebook's kernel, that began it.
"""

import os
import platform
import shutil
import signal
import tempfile
import time
from pathlib import Path

from mpdemo import foreign, paths
from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.slurm import Answer
from mpdemo.world import warm
from mpdemo.world.devices import ON_THE_CPU, too_few_gpus
from mpdemo.world.family import children
from mpdemo.world.processes import child_environment, has_open, is_running, start_time

HERE = "this machine"  # where a job runs that Slurm does not know
PATIENCE = 0.05  # s between two looks at a job
PREFIX = "mpdemo-"  # of the folder for temporary files
GRACE = 5.0  # s between the request to end and the kill
LOG, STATUS = "log.txt", "exit-status.json"
RANKS = "processes.txt"  # the number of each rank's process, a line each
MOST_RANKS = 2**20  # bytes of their numbers
# Of each job of this Python, by its process and start: the pipe whose end ends it, open as long as this Python lives or
# until that end; and its folder for temporary files, which only its supervisor and this Python may remove.
STARTED = {}
# How the supervisor ended a job -> state and reason.
ENDS = {
    "cancelled": ("cancelled", ""),
    "timeout": ("timeout", "TimeLimit"),
    "orphaned": ("cancelled", "it ended with the Python that had started it"),
}


def log_files(job) -> list[Path]:
    """Return the one file that holds what the job prints."""
    return [job.out / LOG]


def cancel(job):
    """Let the supervisor end the job, and wait until it has done so."""
    end = time.monotonic() + GRACE + 6
    send(job, signal.SIGTERM)
    while ask(job).state == "running":
        if time.monotonic() > end:
            raise TimeoutError(f"job {job.id} ({job.name}) does not end; do: kill -9 {job.id}")
        time.sleep(PATIENCE)


def warn(job):
    """Send SIGUSR1 to the supervisor, which passes it on."""
    end = time.monotonic() + GRACE
    while not children(int(job.id)) and supervisor_lives(job.record) and time.monotonic() < end:
        time.sleep(PATIENCE)  # it does not listen yet
    send(job, signal.SIGUSR1)


def send(job, number):
    """Send a signal to the supervisor, if it lives. A record may name any process: one that doesn't write this log."""
    if not supervisor_lives(job.record):
        return
    if _key(job.record) not in STARTED and not has_open(int(job.id), job.out / LOG):
        raise UserError(
            f"process {job.id} does not write {job.folder}/{LOG}, so it is no job of this folder; "
            f"do: remove {job.folder}, or end that process yourself: kill {job.id}"
        )
    os.kill(int(job.id), number)


def ask(job) -> Answer:
    """Return what is known of the job: its end as its supervisor wrote it, else whether that supervisor lives."""
    ended = not supervisor_lives(job.record)
    # read after the question: once it has ended, the file is complete
    if answer := answer_at_the_end(job.out):
        STARTED.pop(_key(job.record), None)
        return answer
    if job.record.get("host", platform.node()) != platform.node():
        return Answer("unknown", f"it was started on {job.record['host']}")
    if ended:
        if own := STARTED.pop(_key(job.record), None):
            shutil.rmtree(own[1], ignore_errors=True)
        return Answer("cancelled", "its supervisor was killed")
    return Answer("running", "", None, time.time() - job.record.get("submitted", time.time()))


def _key(record) -> tuple:
    return int(record["id"]), record.get("started")


def answer_at_the_end(out) -> Answer | None:
    """Return how a job ended, as its supervisor wrote it; None while it runs. Its log is read only if it failed."""
    if not (out / STATUS).exists():
        return None
    with foreign.faults(f"{out / STATUS} is damaged", "do: give the job's log itself"):
        end = foreign.typed(foreign.unpacked(out / STATUS), how=str, exit_status=int, run_time=float)
        how, status, seconds = end["how"], end["exit_status"], end["run_time"]
        log = foreign.tail(out / LOG, slurm.ENOUGH)[0] if status and (out / LOG).is_file() else b""
    state, reason = ENDS.get(how) or (slurm.state_by_status(log.decode(errors="replace"), status), "")
    return Answer(state, reason, status, seconds)


def ranks(out) -> dict:
    """Return the processes of a job that runs: rank -> process."""
    with foreign.faults(f"{out / RANKS} is damaged"):
        return {
            rank: int(line) for rank, line in enumerate(foreign.tail(out / RANKS, MOST_RANKS)[0].split())
        }


def supervisor_lives(record) -> bool:
    """Whether the supervisor of a record is alive; a process of its number that started at another time is not it."""
    return is_running(int(record["id"]), record.get("started"))


def start(spec) -> dict:
    """Start a job's processes under a supervisor; return what the job's record holds of them."""
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))  # short: sockets are made below it
    out = paths.root() / spec.out
    order = {
        "name": spec.name,
        "command": spec.command,
        "processes": spec.world_size,
        "torchrun": spec.launcher == "torchrun",  # which tells a single process its place, too
        "environment": environment_of_ranks(spec, scratch),
        "cwd": str(paths.root()),
        "status": str(out / STATUS),
        "ranks": str(out / RANKS),
        "scratch": str(scratch),
        "signal": spec.signal,
        "limit": slurm.limit(spec.time_limit),
        "grace": GRACE,
    }
    try:
        pid, pipe = warm.supervise(order, out / LOG)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(f"cannot start a job here: {error}") from None
    record = {
        "id": pid,
        "started": start_time(pid),
        "identity": None,
        "where": HERE,
        "host": platform.node(),
    }
    STARTED[_key(record)] = pipe, scratch
    return record


def environment_of_ranks(spec, scratch) -> dict:
    """Return the environment of processes on this machine: no launcher and no Slurm job around them, one thread each.

    Where the GPUs are too few, their devices are CPU cores.
    """
    environment = child_environment() | warm.OF_RANKS | {"TMPDIR": str(scratch)}
    if too_few_gpus(spec.devices):
        environment |= ON_THE_CPU
    return environment
