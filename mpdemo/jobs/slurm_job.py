"""How `mpdemo.jobs.job.Job` submits, asks, cancels and warns a job that Slurm runs.

Slurm's queue is asked once per polling interval for all jobs of all kernels of a user: thirty learners who follow their
jobs must not slow the controller down. So the kernels of a user share small files in ``~/.cache/mpdemo``: the one that
finds an answer older than the interval asks Slurm and writes it anew; the others read. Kept by hand: Slurm's commands
have no such memory. Its own advice: https://slurm.schedmd.com/high_throughput.html.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import reading, slurm
from mpdemo.jobs.slurm import Answer

PATIENCE = 0.5  # s between two looks at the user's jobs, about which Slurm is asked once per polling interval
OWN = ("-u", str(os.getuid()), "-t", "all", "-o", "%i|%T|%M|%r")  # number, state, run time, reason
WAITING = ("-t", "pending", "-S", "-p,i", "-o", "%P|%i")  # of all users, as far as one may see them: the next one first
OLD = 86400  # s after which the file of an answer goes
COUNT_EVERY = 6  # polling intervals between two looks at all users' jobs, from which places in the queue are counted


def start(script, identity, out, site) -> dict:
    """Submit a script, its log redirected into the run's folder; return what the job's record holds of it."""
    log = out.replace("%", "%%") + "/slurm-%j"  # "%" begins a pattern there
    options = [f"--output={log}.out", *[f"--error={log}.err"] * site.separate_errors]
    said = slurm.client("sbatch", "--parsable", *options, str(script), cwd=paths.root())
    forget(identity)
    return {"id": said.split()[-1], "where": f"cluster {identity.split()[0]}", "identity": identity}


def log_files(job) -> list[Path]:
    """Return the files that hold what the job prints; one of errors comes last."""
    return [job.out / f"slurm-{slurm.number(job.id)}.{end}" for end in ("out", "err")]


def cancel(job):
    """Ask Slurm to end the job."""
    slurm.client("scancel", job.id)
    forget(job.record["identity"])


def warn(job):
    """Send SIGUSR1 to the processes that srun started."""
    file = paths.root() / job.script
    script = file.read_text(encoding="utf-8") if file.exists() else ""
    if "torch.distributed.run" in script and "SIGUSR1" not in script:
        raise UserError(f'torchrun passes no warning on in job {job.id}; do: JobSpec(..., signal="USR1@60")')
    slurm.client("scancel", "--signal=USR1", job.id)


def ask(job) -> Answer:
    """Return the record of an earlier answer, or what the controller says, or else the log and the script's marker."""
    if "final" in job.record:
        return Answer(**job.record["final"])
    try:
        answer = _ask_slurm(job)
    except slurm.NoAnswer:  # that is no end of a job: what Slurm said last still holds
        answer, silence = own_job(job, interval=math.inf)
        seen = f", last seen {answer.state} {silence:.0f} s ago" if answer else ""
        return (answer or Answer("pending"))._replace(reason=f"Slurm does not answer{seen}")
    answer = answer or answer_from_files(job)
    if answer.state == "failed":  # Slurm's word for three ends that mean different things to a learner
        answer = answer._replace(state=reading.state_by_status(job.log(), answer.exit_status or 1))
    if answer.state not in ("pending", "running", "unknown"):
        job.keep(answer)
    return answer


def _ask_slurm(job) -> Answer | None:
    """Look the job up among the user's jobs; one that neither waits nor runs is asked for, once."""
    if job.own_cluster is None:  # another cluster in reach may have a job of the same number, so it is not asked
        job.own_cluster = slurm.in_reach() and slurm.identity() == job.record["identity"]
    if not job.own_cluster:
        return None
    answer, silence = own_job(job, job.polling_seconds)
    if silence:
        raise slurm.NoAnswer("squeue")
    return answer or look_up(job.id)


def look_up(job_id) -> Answer | None:
    """Return what Slurm knows of a job; None once it has forgotten it.

    The controller remembers a job for some minutes after its end (``MinJobAge``); accounting, where it is on, for long.
    """
    try:
        line = slurm.client("scontrol", "show", "job", "-o", job_id)
    except slurm.SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
    else:  # the job's name may hold anything, so only the fields after it are read; the first of a name counts
        fields = dict(reversed(re.findall(r" (\w+)=(\S*)", line.partition(" UserId=")[2])))
        return slurm.make_answer(*(fields.get(name, "") for name in ("JobState", "Reason", "ExitCode", "RunTime")))
    try:
        rows = slurm.client("sacct", "-nPX", "-o", "State,ExitCode,Elapsed", "-j", job_id).splitlines()
    except slurm.SlurmError:  # no accounting
        return None
    fields = rows[-1].split("|") if rows else []
    return slurm.make_answer(fields[0], "", *fields[1:]) if len(fields) == 3 else None


def answer_from_files(job) -> Answer:
    """Return what log and script's marker say, once Slurm has forgotten the job. Absence is not success."""
    log, marker = job.log(), job.out / "exit-status.txt"
    if state := reading.state_by_slurm(log):
        return Answer(state, "from the job's log; Slurm has forgotten it")
    words = marker.read_text().split() if marker.exists() else []
    if len(words) == 2 and words[0] == slurm.number(job.id):
        state = reading.state_by_status(log, int(words[1]))
        return Answer(state, "from the script's marker; Slurm has forgotten the job", int(words[1]))
    return Answer("unknown", "Slurm has forgotten the job, and its script left no marker")


class Listing(NamedTuple):
    """What squeue printed, when it was last asked, and when it last answered (seconds since 1970)."""

    asked: float = 0.0
    answered: float = 0.0
    rows: tuple = ()

    def is_fresh(self, interval) -> bool:
        """Whether Slurm was asked less than `interval` seconds ago; a clock may be set back."""
        return 0 <= time.time() - self.asked < interval


def own_job(job, interval) -> tuple[Answer | None, float]:
    """Return what Slurm says of a job that waits or runs (None for any other), and its silence in s."""
    number, _, cluster = job.id.partition(";")
    listing = listed(job.record["identity"], (*OWN, *[f"--clusters={cluster}"] * bool(cluster)), interval)
    silence = 0.0 if listing.answered >= listing.asked else time.time() - listing.answered
    rows = (row.split("|", 3) for row in listing.rows)
    _, state, run_time, reason = next((row for row in rows if row[0] == number), ("", "", "", ""))
    answer = slurm.make_answer(state, reason, "", run_time)
    return answer if answer.state in ("pending", "running") else None, silence


def position(job) -> int | None:
    """Return a job's place among the waiting jobs of its partition, 1 for the next; None if it is not listed."""
    rows = listed(job.record["identity"], WAITING, COUNT_EVERY * job.polling_seconds).rows
    own = next((row for row in rows if row.endswith(f"|{job.id}")), "")
    partition = [row for row in rows if row.rpartition("|")[0] == own.rpartition("|")[0]]
    return partition.index(own) + 1 if own else None


def listed(identity, question, interval) -> Listing:
    """Return squeue's newest answer on a cluster (`slurm.identity`); ask it if that is older than `interval` seconds.

    Where Slurm does not answer, or another kernel is asking just now, it is the last one.
    """
    file = _file(identity, question)
    if (known := _kept(file)).is_fresh(interval):
        return known
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(file.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (known := _kept(file)).is_fresh(interval):  # another kernel has just asked
                return known
        except BlockingIOError:  # another kernel is asking
            return known
        except OSError:  # a full or read-only home: every job asks for itself
            pass
        now = time.time()
        try:
            known = Listing(now, now, slurm.client("squeue", "-h", *question).splitlines())
        except slurm.SlurmError:
            known = known._replace(asked=time.time())
        with contextlib.suppress(OSError):
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(known))
            part.replace(file)
            for other in file.parent.glob("queue-*"):  # of clusters that are gone
                if time.time() - other.stat().st_mtime > OLD:
                    other.unlink()
        return known


def _kept(file) -> Listing:
    try:
        return Listing(*json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):  # not there yet, or of another version
        return Listing()


def forget(identity):
    """Let the next answers be new ones: a job has just been cancelled or submitted."""
    for question in (OWN, WAITING):
        with contextlib.suppress(OSError):  # nothing to forget: no answer is kept there
            _file(identity, question).unlink()


def _file(identity, question) -> Path:
    """Return the file of an answer, in a folder that nobody else may read."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpdemo"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"queue-{hashlib.sha256(f'{identity} {question}'.encode()).hexdigest()[:16]}.json"
