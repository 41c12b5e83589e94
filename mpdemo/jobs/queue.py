"""Slurm's queue, asked once per polling interval for all jobs of all kernels of a user.

Thirty learners who follow their jobs must not slow the controller down. So the kernels of a user share one small file
in ``~/.cache/mpdemo``: the one that finds it older than the interval asks Slurm and writes it anew; the others read.
Kept by hand: Slurm's commands have no such memory. Its own advice: https://slurm.schedmd.com/high_throughput.html.
"""

import fcntl
import hashlib
import json
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mpdemo.jobs import array, slurm
from mpdemo.jobs.slurm_answers import Answer, make_answer, seconds_of

FORMAT = "%i|%U|%P|%T|%M|%r"  # number, user's number, partition, state, run time, reason
COUNT_EVERY = 6  # polling intervals between two listings of all users' jobs, from which places in the queue are counted
OLD = 86400  # seconds after which the file of another cluster is removed


@dataclass(frozen=True)
class Listing:
    """The queue at one moment; times in seconds since 1970.

    Attributes
    ----------
    asked, answered, counted : float
        When Slurm was last asked, when it last answered, and when it last listed the jobs of all users.
    jobs : dict
        Number -> (state, run time, reason) of the user's own jobs.
    waiting : dict
        Partition -> numbers of all waiting jobs that the user may see, the next one first.
    """

    asked: float = 0.0
    answered: float = 0.0
    counted: float = 0.0
    jobs: dict = field(default_factory=dict)
    waiting: dict = field(default_factory=dict)

    @property
    def silence(self) -> float:
        """Seconds for which Slurm has not answered; 0 where its last answer is the newest."""
        return 0.0 if self.answered >= self.asked else time.time() - self.answered

    def is_fresh(self, interval) -> bool:
        """Return whether Slurm was asked within the last `interval` seconds; a clock may be set back."""
        return 0 <= time.time() - self.asked < interval

    def answer(self, job_id) -> Answer | None:
        """Return what is known of a waiting or running job; None for any other."""
        state, run_time, reason = self.jobs.get(job_id, ("", "", ""))
        answer = make_answer(state, reason, "", seconds_of(run_time))
        return answer if answer.state in ("pending", "running") else None

    def position(self, job_id) -> int | None:
        """Return the job's place among the waiting jobs of its partition, 1 for the next; None if it is not listed."""
        siblings = job_id.partition("_")[0] + "_["  # the waiting elements of an array stand in one row
        rows = [number for ids in self.waiting.values() for number in enumerate(ids, 1)]
        return next((place for place, number in rows if number == job_id or number.startswith(siblings)), None)


def listing(identity, interval) -> Listing:
    """Return the newest listing of a cluster (`slurm.identity`); ask Slurm if it is older than `interval` seconds.

    Where Slurm does not answer, or another kernel is asking just now, it is the last one.
    """
    file = _file(identity)
    known = _read(file)
    if known.is_fresh(interval):
        return known
    with _lock(file) as locked:
        known = _read(file)
        if locked and not known.is_fresh(interval):
            known = _ask(known, interval)
            _write(file, known)
    return known


def forget(identity):
    """Let the next listing be a new one: a job has just been cancelled or submitted."""
    with suppress(OSError):  # nothing to forget: no listing is kept there
        _file(identity).unlink()


def _ask(known, interval) -> Listing:
    """Ask Slurm once: of one's own jobs, and now and then of all users'."""
    now, user = time.time(), str(os.getuid())
    uncounted = any(state == "PENDING" and not known.position(job) for job, (state, *_) in known.jobs.items())
    counting = uncounted or now - known.counted >= COUNT_EVERY * interval
    whose = [] if counting else ["-u", user]
    try:
        rows = slurm.client("squeue", "-h", "-t", "all", "-S", "-p,i", "-o", FORMAT, *whose).splitlines()
    except slurm.SlurmError:
        return Listing(**asdict(known) | {"asked": time.time()})
    rows = [row.split("|", 5) for row in rows if row.count("|") >= 5]
    jobs = {
        job: (state, run_time, reason)
        for numbers, owner, _, state, run_time, reason in rows
        if owner == user
        for job in job_numbers(numbers)
    }
    if not counting:
        return Listing(now, now, known.counted, jobs, known.waiting)
    waiting = {}
    for number, _, partition, state, _, _ in rows:
        if state == "PENDING":
            waiting.setdefault(partition, []).append(number)
    return Listing(now, now, now, jobs, waiting)


def job_numbers(text) -> list[str]:
    """Return the numbers in squeue's first column: the waiting elements of an array stand in one row.

    Examples
    --------
    >>> job_numbers("36_[2-3,7%2]"), job_numbers("37")
    (['36_2', '36_3', '36_7'], ['37'])
    """
    job, bracket, elements = text.partition("_[")
    with suppress(ValueError):
        return [f"{job}_{index}" for index in array.indices(elements.removesuffix("]"))] if bracket else [text]
    return [text]  # an array larger than ours may be


def _file(identity) -> Path:
    """Return the file of a cluster, in a folder that nobody else may read."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpdemo"
    with suppress(OSError):  # a full or read-only home: every job then asks for itself
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"queue-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _read(file) -> Listing:
    try:
        return Listing(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):  # not there yet, or of another version
        return Listing()


def _write(file, known):
    """Replace the file in one step, and remove those of clusters that are gone."""
    with suppress(OSError):
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(known)))
        part.replace(file)
        for other in file.parent.glob("queue-*"):
            if time.time() - other.stat().st_mtime > OLD:
                other.unlink()


@contextmanager
def _lock(file):
    """Yield whether this kernel is the one to ask; it is, too, where no file can be locked."""
    try:
        lock = file.with_suffix(".lock").open("w")
    except OSError:
        yield True
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
