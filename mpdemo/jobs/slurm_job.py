"""How `mpdemo.jobs.job.Job` submits, asks, cancels and warns a job that Slurm runs.

Thirty learners who follow several jobs each must not slow the controller down, so Slurm's queue is asked once per
polling interval for all jobs that this Python follows: https://slurm.schedmd.com/high_throughput.html.
"""

import math
import os
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

from mpdemo import foreign, paths
from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.slurm import Answer

PATIENCE = 0.5  # s between two looks at the user's jobs
OWN = ("-u", str(os.getuid()), "-t", "all", "-o", "%i|%T|%M|%r")  # number, state, run time, reason
# of all users, as far as one may see them: the next one first
WAITING = ("-t", "pending", "-S", "-p,i", "-o", "%P|%i")
# polling intervals between two looks at all users' jobs, from which places in the queue are counted
COUNT_EVERY = 6
LISTINGS = {}  # the newest answer, by the cluster (`slurm.identity`) and the question
LOCK = threading.Lock()  # threads that look at the same time ask once
CANCELLED = re.compile(
    slurm.SLURMSTEPD + r"\*\*\* JOB .*?CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*", re.MULTILINE
)


def start(spec, script, identity, separate_errors=False) -> dict:
    """Submit a job's script, its log redirected into the run's folder; return what the job's record holds of it."""
    log = spec.out.replace("%", "%%") + "/slurm-%j"  # "%" begins a pattern there
    options = [f"--output={log}.out"]
    if separate_errors:
        options.append(f"--error={log}.err")
    said = slurm.client("sbatch", "--parsable", *options, str(script), cwd=paths.root())
    number = said.split()[-1]
    LISTINGS.clear()  # the next answers are new ones
    return {"id": number, "where": f"cluster {identity.split()[0]}", "identity": identity}


def log_files(job) -> list[Path]:
    """Return the files that hold what the job prints; one of errors comes last."""
    return [job.out / f"slurm-{slurm.number(job.id)}.{end}" for end in ("out", "err")]


def cancel(job):
    """Ask Slurm to end the job."""
    slurm.client("scancel", job.id)
    LISTINGS.clear()


def warn(job):
    """Send SIGUSR1 to the processes that srun started."""
    file = paths.root() / job.script
    script = file.read_text(encoding="utf-8") if file.exists() else ""
    if "torch.distributed.run" in script and "SIGUSR1" not in script:
        raise UserError(f'torchrun passes no warning on in job {job.id}; do: run(..., signal="USR1@60")')
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
        answer = answer._replace(
            state=slurm.state_by_status(job.log(slurm.ENOUGH), answer.exit_status or 1)
        )
    if answer.state not in ("pending", "running", "unknown"):
        job.remember(answer)
    return answer


def _ask_slurm(job) -> Answer | None:
    """Look the job up among the user's jobs; one that neither waits nor runs is asked for, once."""
    # another reachable cluster may have a job of the same number, so it is not asked
    if job.own_cluster is None:
        job.own_cluster = slurm.in_reach() and slurm.identity() == job.record["identity"]
    if not job.own_cluster:
        return None
    answer, silence = own_job(job, job.polling_seconds)
    if silence:
        raise slurm.NoAnswer("squeue")
    return answer or look_up(job.id)


class Listing(NamedTuple):
    """What squeue printed, when it was last asked, and when it last answered (seconds of the monotonic clock)."""

    asked: float = 0.0
    answered: float = 0.0
    rows: tuple = ()


def listed(job, question, interval) -> Listing:
    """Return squeue's newest answer on a job's cluster; ask it if the last time is `interval` seconds ago."""
    key = job.record["identity"], question
    with LOCK:
        known = LISTINGS.get(key, Listing())
        now = time.monotonic()
        if now - known.asked >= interval:
            try:
                known = Listing(now, now, tuple(slurm.client("squeue", "-h", *question).splitlines()))
            except slurm.SlurmError:
                known = known._replace(asked=time.monotonic())
            LISTINGS[key] = known
        return known


def own_job(job, interval) -> tuple[Answer | None, float]:
    """Return what Slurm says of a job that waits or runs (None for any other), and its silence in s."""
    number, _, cluster = job.id.partition(";")
    listing = listed(job, (*OWN, f"--clusters={cluster}") if cluster else OWN, interval)
    silence = 0.0 if listing.answered >= listing.asked else time.monotonic() - listing.answered
    rows = (row.split("|", 3) for row in listing.rows)
    _, state, run_time, reason = next((row for row in rows if row[0] == number), ("", "", "", ""))
    answer = slurm.make_answer(state, reason, "", run_time)
    return answer if answer.state in ("pending", "running") else None, silence


def position(job) -> int | None:
    """Return a job's place among the waiting jobs of its partition, 1 for the next; None if it is not listed."""
    rows = listed(job, WAITING, COUNT_EVERY * job.polling_seconds).rows
    own = next((row for row in rows if row.endswith(f"|{job.id}")), "")
    partition = [row for row in rows if row.rpartition("|")[0] == own.rpartition("|")[0]]
    return partition.index(own) + 1 if own else None


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
        return slurm.make_answer(
            *(fields.get(name, "") for name in ("JobState", "Reason", "ExitCode", "RunTime"))
        )
    try:
        rows = slurm.client("sacct", "-nPX", "-o", "State,ExitCode,Elapsed", "-j", job_id).splitlines()
    except slurm.SlurmError:  # no accounting
        return None
    fields = rows[-1].split("|") if rows else []
    return slurm.make_answer(fields[0], "", *fields[1:]) if len(fields) == 3 else None


def answer_from_files(job) -> Answer:
    """Return what log and script's marker say, where Slurm does not. Absence is not success."""
    log, marker = job.log(slurm.ENOUGH), job.out / "exit-status.txt"
    why = "Slurm has forgotten the job" if job.own_cluster else "its cluster can't be reached"
    if match := CANCELLED.search(log):  # written there as Slurm ended the job
        by_slurm = {"TIME LIMIT": "timeout", "NODE FAILURE": "node_failure"}.get(match[1], "cancelled")
    else:
        by_slurm = "out_of_memory" if slurm.MEMORY.search(log) else None
    if by_slurm:
        return Answer(by_slurm, f"from the job's log; {why}")
    words = foreign.tail(marker, 99)[0].decode(errors="replace").split() if marker.is_file() else []
    if len(words) == 2 and words[0] == slurm.number(job.id) and words[1].isdecimal():
        state = slurm.state_by_status(log, int(words[1]))
        return Answer(state, f"from the script's marker; {why}", int(words[1]))
    return Answer("unknown", f"{why}, and its script left no marker")
