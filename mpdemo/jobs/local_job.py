"""A job on this machine: the same command under torchrun, watched by a supervisor so that nothing outlives it."""

import json
import math
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
from mpdemo.jobs.job import HERE, LOG, Job
from mpdemo.jobs.record import read_text
from mpdemo.jobs.slurm_answers import Answer
from mpdemo.world.gpus import ON_THE_CPU, too_few_gpus
from mpdemo.world.launch import torchrun_arguments
from mpdemo.world.processes import child_environment, first_child, is_running, start_time

PREFIX = "mpdemo-"  # of the folder for temporary files
GRACE = 5.0  # seconds between the request to end and the kill
STATUS = "exit-status.json"
ORPHANED = "it ended with the Python that had started it"
# How the supervisor ended a job -> state and reason.
ENDS = {"cancelled": ("cancelled", ""), "orphaned": ("cancelled", ORPHANED), "timeout": ("timeout", "TimeLimit")}


class LocalJob(Job):
    """A job under this machine's supervisor. It ends with the Python (the notebook's kernel) that started it.

    See `mpdemo.jobs.job.Job`.
    """

    patience = 0.05

    def __init__(self, record, out, process=None):
        super().__init__(record, out)
        self._process = process  # kept open: its stdin is the pipe whose end ends the job

    def cancel(self):
        if not self.finished and supervisor_lives(self.record):
            os.kill(int(self.id), signal.SIGTERM)
            self._seen = None
            self.wait(GRACE + 6)

    def warn(self):
        begun = supervisor_lives(self.record) and first_child(int(self.id))
        if not begun:
            raise UserError(f"job {self.id} ({self.name}) is {self.state}; only a running job can be warned")
        os.kill(int(self.id), signal.SIGUSR1)  # the supervisor passes it on

    def _ask(self):
        ended = self._process.poll() is not None if self._process else not supervisor_lives(self.record)
        # read after the question: once it has ended, the file is complete
        if answer := answer_at_the_end(self.out):
            return answer
        if self.record.get("host", platform.node()) != platform.node():
            return Answer("unknown", f"it was started on {self.record['host']}")
        if ended:
            scratch = Path(self.record["scratch"])
            if scratch.parent == Path(tempfile.gettempdir()) and scratch.name.startswith(PREFIX):
                shutil.rmtree(scratch, ignore_errors=True)  # never another folder: the record may be anybody's
            return Answer("cancelled", "its supervisor was killed")
        return Answer("running", "", None, time.time() - self.record["submitted"])


def answer_at_the_end(out) -> Answer | None:
    """Return how a job on this machine ended, as its supervisor wrote it; None while it runs.

    Its log, which may be long, is read only once it has ended.
    """
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
    """Start a job's processes here, or as a step of the job around us where the site says so.

    Returns what the job's record holds of them, and their supervisor.
    """
    root = paths.root()
    out = root / spec.out
    scratch = tempfile.mkdtemp(prefix=PREFIX)  # short: sockets are made below it
    around = allocation.surrounding_job(site)
    how = allocation.as_step(spec, site, around) if around else as_processes(spec, scratch)
    order = {
        "command": how.command,
        "status": str(out / STATUS),
        "limit": min(times.limit(spec.time_limit), how.limit),
        "signal": spec.signal,
        "launcher": how.launcher,
        "grace": GRACE,
        "scratch": scratch,
    }
    supervisor = Path(__file__).with_name("supervisor.py")
    try:
        with open(out / LOG, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-S", str(supervisor), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=how.environment,
                cwd=root,
                start_new_session=True,
            )
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(f"cannot start a job here: {error}") from None
    record = {"id": process.pid, "started": start_time(process.pid), "where": how.where, "identity": None}
    return record | {"host": platform.node(), "scratch": scratch}, process


def as_processes(spec, scratch) -> allocation.Start:
    """How a job starts on this machine: by torchrun, with no launcher and no Slurm job around it, one thread each.

    A single process needs no launcher. Where the GPUs are too few, its devices are CPU cores.
    """
    if spec.world_size == 1:
        arguments, launcher = ["-u", *spec.command], ""
    else:
        torchrun = torchrun_arguments(spec.command, spec.world_size)
        arguments, launcher = ["-m", "torch.distributed.run", *torchrun], "torchrun"
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": scratch}
    own |= spec.torchrun_signals
    if too_few_gpus(spec.devices):
        own |= ON_THE_CPU
    return allocation.Start([sys.executable, *arguments], child_environment() | own, math.inf, launcher, HERE)
