"""Slurm's queue, asked once per polling interval for all jobs that this Python follows.

Thirty learners who follow several jobs each must not slow the controller down, so one answer serves all jobs of a
notebook's kernel. Our own code: Slurm's commands have no such memory. Its own advice:
https://slurm.schedmd.com/high_throughput.html.
"""

import os
import threading
import time
from typing import NamedTuple

from mpdemo.jobs import slurm
from mpdemo.jobs.slurm import Answer

OWN = ("-u", str(os.getuid()), "-t", "all", "-o", "%i|%T|%M|%r")  # number, state, run time, reason
WAITING = ("-t", "pending", "-S", "-p,i", "-o", "%P|%i")  # of all users, as far as one may see them: the next one first
COUNT_EVERY = 6  # polling intervals between two looks at all users' jobs, from which places in the queue are counted
LISTINGS = {}  # the newest answer, by the cluster (`slurm.identity`) and the question
LOCK = threading.Lock()  # threads that look at the same time ask once


class Listing(NamedTuple):
    """What squeue printed, when it was last asked, and when it last answered (seconds of the monotonic clock)."""

    asked: float = 0.0
    answered: float = 0.0
    rows: tuple = ()


def own(job_id) -> tuple:
    """Return the question that lists the user's jobs, on the cluster that a job's number names."""
    _, _, cluster = job_id.partition(";")
    return (*OWN, *[f"--clusters={cluster}"] * bool(cluster))


def own_job(job, interval) -> tuple[Answer | None, float]:
    """Return what Slurm says of a job that waits or runs (None for any other), and its silence in s."""
    listing = listed(job.record["identity"], own(job.id), interval)
    silence = 0.0 if listing.answered >= listing.asked else time.monotonic() - listing.answered
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
    """Return squeue's newest answer on a cluster; ask it if the last time is `interval` seconds ago.

    Where Slurm does not answer, it is the last answer.
    """
    with LOCK:
        known = LISTINGS.get((identity, question), Listing())
        now = time.monotonic()
        if now - known.asked >= interval:
            try:
                known = Listing(now, now, tuple(slurm.client("squeue", "-h", *question).splitlines()))
            except slurm.SlurmError:
                known = known._replace(asked=time.monotonic())
            LISTINGS[identity, question] = known
        return known


def forget(identity, job_id):
    """Let the next answers be new ones: a job has just been cancelled or submitted."""
    for question in (own(job_id), WAITING):
        LISTINGS.pop((identity, question), None)
