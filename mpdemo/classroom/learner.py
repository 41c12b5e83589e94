"""What the files in a learner's folder say: jobs, summaries, exercises that were right, and the disk that runs take.

Only files are read, and nothing is written: a trainer needs no right to the learners' folders but to look into them.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.exercises.progress import right_answers
from mpdemo.jobs import diagnose
from mpdemo.jobs.local_job import ENDS, STATUS, supervisor_lives
from mpdemo.jobs.record import RECORD, read_record, read_text


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
    """A learner's folder: ``exercises`` are the numbers answered right, ``size`` the bytes of all runs."""

    folder: Path
    owner: str
    runs: list = field(default_factory=list)
    exercises: list = field(default_factory=list)
    size: int = 0

    def count(self, *states) -> int:
        """Return how many runs are in one of the states."""
        return sum(run.state in states for run in self.runs)


def learners(folders) -> list[Path]:
    """Return the folders that one works in, among `folders` and the folders right below them.

    Raises
    ------
    UserError
        No such folder, or nobody works in it.
    """
    result = []
    for folder in (Path(folder).resolve() for folder in folders):
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give the learners' folders, or the one that holds them")
        places = [folder, *sorted(place for place in folder.iterdir() if place.is_dir())]
        worked_in = [place for place in places if (place / "runs").is_dir() or (place / "work").is_dir()]
        if not worked_in:
            raise UserError(f"neither {folder} nor a folder in it has runs/ or work/: nobody works there yet")
        result += worked_in
    return list(dict.fromkeys(result))


def look(folder, queue) -> Learner:
    """Read a learner's folder.

    Parameters
    ----------
    folder : Path
    queue : dict
        Number of a job -> our state of it, of all jobs that Slurm has now.
    """
    records = sorted((folder / "runs").glob(f"**/{RECORD}"))
    runs = [run for record in records if (run := _run(record.parent, folder / "runs", queue))]
    files = [file for file in (folder / "runs").rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return Learner(folder, _owner(folder), runs, right_answers(folder), size)


def _owner(folder):
    try:
        return folder.owner()
    except KeyError:  # in a container, users may have no names
        return f"user {folder.stat().st_uid}"


def _run(out, runs, queue):
    try:
        job = read_record(out)
    except UserError:
        return None  # a damaged file of one run hides no other
    files = [out / name for name in (RECORD, "metrics.jsonl", "summary.json", STATUS)]
    changed = max(file.stat().st_mtime for file in files if file.exists())
    try:
        summary = json.loads(read_text(out / "summary.json") or "{}")
    except ValueError:
        summary = {}
    return Run(str(out.relative_to(runs)), job, _state(out, job, summary, queue), summary, changed)


def _state(out, job, summary, queue):
    """Return a job's state without asking Slurm for it alone, and without writing into its folder."""
    if "final" in job:
        return job["final"]["state"]
    if job["where"] == "this machine":
        if end := json.loads(read_text(out / STATUS) or "{}"):
            log = read_text(out / "log.txt")
            return (ENDS.get(end["how"]) or (diagnose.state_by_status(log, end["exit_status"]),))[0]
        return "running" if supervisor_lives(job) else "cancelled"
    if state := queue.get(str(job["id"])):
        return state
    log = "".join(read_text(out / f"slurm-{job['id']}.{end}") for end in ("out", "err"))
    marker = read_text(out / "exit-status.txt").split()
    if len(marker) == 2 and marker[0] == str(job["id"]):
        return diagnose.state_by_status(log, int(marker[1]))
    return diagnose.state_by_slurm(log) or ("done" if summary else "unknown")


def last_change(learner) -> str:
    """Return how long ago a learner's runs last wrote something."""
    if not learner.runs:
        return ""
    minutes = max(0, int(time.time() - max(run.changed for run in learner.runs)) // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"


def is_own(run_folder) -> bool:
    """Return whether a folder belongs to the user who asks."""
    return run_folder.stat().st_uid == os.getuid()
