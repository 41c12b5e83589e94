"""What the files in a learner's folder say: jobs, summaries, exercises that were right, and the disk that runs take.

Only files are read, and nothing is written: a trainer needs no right to the learners' folders but to look into them.
A learner can write anything into these files, so nothing that they say makes a job or a process of somebody else end.
"""

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.jobs import times
from mpdemo.jobs.job import FINISHED
from mpdemo.jobs.local_job import STATUS, answer_at_the_end, supervisor_lives
from mpdemo.jobs.record import RECORD, read_record, read_text
from mpdemo.jobs.slurm_job import SlurmJob
from mpdemo.notebook.check import right_answers

ODD = (OSError, ValueError, KeyError, TypeError, AttributeError)  # of files that hold something else, or are private


@dataclass(frozen=True)
class Queue:
    """What Slurm has now.

    Attributes
    ----------
    identity : str or None
        Of the cluster (`mpdemo.jobs.slurm.identity`); None without a Slurm in reach.
    jobs : dict
        Number of a job -> its user's number and our state, of all jobs that one may see.
    """

    identity: str | None = None
    jobs: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One run folder with the job that wrote it.

    Attributes
    ----------
    name : str
        Of the folder, relative to ``runs/``.
    job : dict
        What job.json holds.
    state : str
        As `mpdemo.jobs.job.Job.state`.
    summary : dict
        The run's summary.json; {} while there is none.
    changed : float
        When something was last written, in seconds since 1970.
    """

    name: str
    job: dict
    state: str
    summary: dict
    changed: float


@dataclass(frozen=True)
class Learner:
    """A learner's folder: ``exercises`` are the numbers answered right, ``size`` the bytes of all runs.

    ``problem`` says why a folder cannot be read.
    """

    folder: Path
    owner: str
    runs: list = field(default_factory=list)
    exercises: list = field(default_factory=list)
    size: int = 0
    problem: str = ""

    def count(self, *states) -> int:
        """Return how many runs are in one of the states."""
        return sum(run.state in states for run in self.runs)


def learners(folders) -> list[Path]:
    """Return the folders that one works in, among `folders` and the folders right below them.

    Raises
    ------
    UserError
        No such folder, or nobody works in any.
    """
    result = []
    for folder in (Path(folder).resolve() for folder in folders):
        if not os.path.isdir(folder):  # false, too, where one may not look
            raise UserError(f"{folder} is no folder, or hidden; give the learners' folders, or the one that holds them")
        result += [place for place in (folder, *_below(folder)) if _worked_in(place)]
    if not result:
        raise UserError(f"no runs/ or work/ in {', '.join(map(str, folders))} or right below: nobody works there yet")
    return list(dict.fromkeys(result))


def _below(folder):
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _worked_in(place):
    """Whether a learner works there; one that cannot be looked into counts, so that its row says so."""
    try:
        return place.is_dir() and ((place / "runs").is_dir() or (place / "work").is_dir())
    except PermissionError:
        return True


def look(folder, queue) -> Learner:
    """Read a learner's folder; `queue` is a `Queue`."""
    owner = _owner(folder)
    try:
        list(folder.iterdir())
    except OSError as error:
        return Learner(folder, owner, problem=f"cannot be read: {error.strerror}")
    records = sorted((folder / "runs").glob(f"**/{RECORD}"))
    runs = [run for record in records if (run := _run(record.parent, folder / "runs", queue))]
    return Learner(folder, owner, runs, right_answers(folder), _size(folder / "runs"))


def _owner(folder):
    try:
        return folder.owner()
    except KeyError:  # in a container, users may have no names
        return f"user {folder.stat().st_uid}"


def _size(folder):
    """Return the bytes of all files; those that vanish meanwhile, as a training writes, are left out."""
    size = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size


def _run(out, runs, queue):
    """Return what a run's folder says; None where its job.json cannot be read: it hides no other run."""
    try:
        job, record = read_record(out), (out / RECORD).stat()
    except (UserError, OSError):
        return None
    changed = record.st_mtime
    for name in ("metrics.jsonl", "summary.json", STATUS):
        with suppress(OSError):
            changed = max(changed, (out / name).stat().st_mtime)
    summary, state = {}, "unknown"
    with suppress(*ODD):
        summary = json.loads(read_text(out / "summary.json") or "{}")
    with suppress(*ODD):
        state = _state(out, job, record.st_uid, queue)
    return Run(str(out.relative_to(runs)), job, state, summary, changed)


def _state(out, job, user, queue):
    """Return a job's state, of which a user's job.json tells; neither asks Slurm for it alone nor writes anything."""
    if not job.get("identity"):
        if answer := answer_at_the_end(out):
            return answer.state
        if job.get("host") != platform.node():
            return "unknown"  # its processes are on another machine
        return "running" if supervisor_lives(job) else "cancelled"
    if job.get("final", {}).get("state") in FINISHED:
        return job["final"]["state"]
    owner, state = queue.jobs.get(str(job["id"]), (None, None))
    if job["identity"] == queue.identity and owner == user:
        return state
    return SlurmJob(job, out).answer_from_files().state


def last_change(learner) -> str:
    """Return how long ago a learner's runs last wrote something."""
    if not learner.runs:
        return ""
    return times.duration(max(0, time.time() - max(run.changed for run in learner.runs)))
