"""``python -m mpdemo class``: who has come how far, in one table, with one row per learner.

    python -m mpdemo class /path/to/learners

It reads the learners' files and calls squeue once. Nothing is written: a trainer needs no right to the folders but to
look into them. A learner can write anything into these files, so what they say is only ever shown.
"""

import argparse
import json
import os
import platform
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.jobs import Job, slurm
from mpdemo.jobs.job import FINISHED, RECORD, read_record
from mpdemo.jobs.local_job import answer_at_the_end, supervisor_lives
from mpdemo.jobs.slurm_job import answer_from_files

COUNTED = ("done", "failed", "pending", "other")
HEADERS = ("learner", "exercises right", *COUNTED, "running", "MiB in runs")
FAILED = ("failed", "timeout", "out_of_memory", "node_failure")
# "other" is what was stopped or cancelled, what Slurm does not show from here, and what another machine runs.
NAMES = {"done": "done", "pending": "pending", "running": "running"} | dict.fromkeys(FAILED, "failed")
ODD = (OSError, ValueError, KeyError, TypeError, AttributeError, UserError)  # of files that hold something else


def add_arguments(parser):
    """Declare the arguments of ``mpdemo class``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="learners' folders, or one that holds them")


def main(args) -> int:
    """Print the table; return 0."""
    folders = learners(args.folders)
    identity, queue = (slurm.identity(), jobs_in_queue()) if slurm.in_reach() else (None, {})
    common = folders[0].parent if len(folders) == 1 else os.path.commonpath(folders)
    rows = [[os.path.relpath(folder, common), *row(folder, identity, queue)] for folder in folders]
    print(tabulate(rows, HEADERS, "simple", disable_numparse=True))
    return 0


def learners(folders) -> list[Path]:
    """Return the folders that learners work in, among `folders` and the folders right below them."""
    result = []
    for folder in (Path(folder).resolve() for folder in folders):
        if not os.path.isdir(folder):  # false, too, for a folder that one may not look at
            raise UserError(f"{folder} is no folder, or hidden; give the learners' folders, or the one that holds them")
        below = []
        with suppress(OSError):
            below = sorted(folder.iterdir())
        result += filter(worked_in, (folder, *below))
    if not result:
        raise UserError(f"no runs/ or work/ in {', '.join(map(str, folders))} or right below; give learners' folders")
    return list(dict.fromkeys(result))


def worked_in(place) -> bool:
    """Whether a learner works there; a folder that cannot be looked into counts, so that its row says so."""
    inside = not os.access(place, os.X_OK) or any(os.path.isdir(place / name) for name in ("runs", "work"))
    return os.path.isdir(place) and inside


def jobs_in_queue() -> dict:
    """Ask Slurm once for the jobs that it has now: number -> its user's number and our state."""
    lines = slurm.client("squeue", "--noheader", "-o", "%i|%U|%T").split()
    rows = (line.split("|") for line in lines)
    return {number: (int(user), slurm.STATES.get(state, "unknown")) for number, user, state in rows}


def row(folder, identity, queue) -> list:
    """Return a learner's row, without the name; `queue` holds the jobs of the cluster `identity`."""
    try:
        list(folder.iterdir())
    except OSError as error:
        return [f"cannot be read: {error.strerror}", *[0] * len(COUNTED), "", ""]
    runs, states = folder / "runs", {}
    for record in sorted(runs.glob(f"**/{RECORD}")):
        with suppress(*ODD):  # a damaged record hides no other run
            job = read_record(record.parent)
            states[record.parent] = "other"
            state = state_of(record.parent, job, record.stat().st_uid, identity, queue)
            states[record.parent] = NAMES.get(state, "other")
    counts = Counter(states.values())
    running = ", ".join(str(out.relative_to(runs)) for out, state in states.items() if state == "running")
    unknown = "?" if runs.exists() else "0"
    size = subprocess.run(["timeout", "30", "du", "-smD", runs], capture_output=True, text=True).stdout.split()
    return [exercises(folder), *(counts[state] for state in COUNTED), running, *(size[:1] or [unknown])]


def state_of(out, job, user, identity, queue) -> str:
    """Return the state of a user's job, of which its record tells; asks no one and writes nothing."""
    if not job.get("identity"):  # a job of one machine
        if answer := answer_at_the_end(out):
            return answer.state
        if job.get("host") != platform.node():
            return "unknown"
        return "running" if supervisor_lives(job) else "cancelled"
    if job.get("final", {}).get("state") in FINISHED:
        return job["final"]["state"]
    owner, state = queue.get(str(job["id"]), (None, None))
    if job["identity"] == identity and owner == user:  # numbers of other clusters and users may be the same
        return state
    return answer_from_files(Job(job, out)).state


def exercises(folder) -> str:
    """Return how many exercises of each notebook were right, as ``00: 1, 03: 2``."""
    with suppress(*ODD):
        numbers = json.loads((folder / "work" / "right.json").read_text())
        counts = Counter(number.partition(".")[0] for number in numbers)
        return ", ".join(f"{notebook}: {counts[notebook]}" for notebook in sorted(counts))
    return ""
