"""Slurm's queue, asked once per polling interval for all jobs of all kernels of a user.

Thirty learners who follow their jobs must not slow the controller down. So the kernels of a user share small files in
``~/.cache/mpdemo``: the one that finds an answer older than the interval asks Slurm and writes it anew; the others
read. Our own code: Slurm's commands have no such memory. Its own advice: https://slurm.schedmd.com/high_throughput.html.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from mpdemo.jobs import slurm
from mpdemo.jobs.slurm import Answer

OWN = ("-u", str(os.getuid()), "-t", "all", "-o", "%i|%T|%M|%r")  # number, state, run time, reason
WAITING = ("-t", "pending", "-S", "-p,i", "-o", "%P|%i")  # of all users, as far as one may see them: the next one first
COUNT_EVERY = 6  # polling intervals between two looks at all users' jobs, from which places in the queue are counted
OLD = 86400  # s after which the file of an answer goes


class Listing(NamedTuple):
    """What squeue printed, when it was last asked, and when it last answered (seconds since 1970)."""

    asked: float = 0.0
    answered: float = 0.0
    rows: tuple = ()

    def is_fresh(self, interval) -> bool:
        """Whether Slurm was asked less than `interval` seconds ago; a clock may be set back."""
        return 0 <= time.time() - self.asked < interval


def own(job_id) -> tuple:
    """Return the question that lists the user's jobs, on the cluster that a job's number names."""
    _, _, cluster = job_id.partition(";")
    return (*OWN, *[f"--clusters={cluster}"] * bool(cluster))


def own_job(job, interval) -> tuple[Answer | None, float]:
    """Return what Slurm says of a job that waits or runs (None for any other), and its silence in s."""
    listing = listed(job.record["identity"], own(job.id), interval)
    silence = 0.0 if listing.answered >= listing.asked else time.time() - listing.answered
    rows = (row.split("|", 3) for row in listing.rows)
    _, state, run_time, reason = next((row for row in rows if row[0] == slurm.number(job.id)), ("", "", "", ""))
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

    Where Slurm does not answer, or another kernel is just asking, it is the last answer.
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


def forget(identity, job_id):
    """Let the next answers be new ones: a job has just been cancelled or submitted."""
    for question in (own(job_id), WAITING):
        with contextlib.suppress(OSError):  # nothing to forget: no answer is kept there
            _file(identity, question).unlink()


def _file(identity, question) -> Path:
    """Return the file of an answer, in a folder that no other user may read."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpdemo"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"queue-{hashlib.sha256(f'{identity} {question}'.encode()).hexdigest()[:16]}.json"
