"""``python -m mpdemo class``: who has come how far, in one table; cancel what still runs; collect the summaries.

    python -m mpdemo class /path/to/learners
    python -m mpdemo class /path/to/learners --collect class.json
    python -m mpdemo class /path/to/learners --cancel        by the trainer of the account, or by root

One row per learner's folder: exercises answered right and jobs by state, from their files and one call of squeue.
"""

import argparse
import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from tabulate import tabulate

from mpdemo.classroom.learner import is_own, last_change, learners, look
from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.job import FINISHED
from mpdemo.jobs.slurm_answers import STATES
from mpdemo.jobs.submit import make_job

HEADERS = ("learner", "exercises right", "done", "failed", "waiting", "now running", "last change", "MiB in runs")
WELL = ("done", "stopped", "cancelled")


def add_arguments(parser):
    """Declare the arguments of ``mpdemo class``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="learners' folders, or one that holds them")
    parser.add_argument("--collect", metavar="FILE", help="write all runs with their summaries, as JSON")
    parser.add_argument("--cancel", action="store_true", help="cancel every job that waits or runs")


def main(args) -> int:
    """Print the table; return 1 where a job could not be cancelled, else 0."""
    queue = queue_of_all() if slurm.in_reach() else {}
    students = [look(folder, queue) for folder in learners(args.folders)]
    print(tabulate([row(learner) for learner in students], HEADERS, "simple", disable_numparse=True))
    if args.collect:
        collect(students, args.collect)
    return cancel(students) if args.cancel else 0


def queue_of_all() -> dict:
    """Return the states of all jobs that Slurm has now and the user may see: number -> our state. Asks once."""
    lines = slurm.client("squeue", "--noheader", "-o", "%i|%T").split()
    jobs = (line.split("|") for line in lines)
    return {number: STATES.get(state, "unknown") for number, state in jobs}


def row(learner) -> list:
    """Return a learner's row of the table."""
    by_notebook = groupby(learner.exercises, key=lambda number: number.partition(".")[0])
    exercises = ", ".join(f"{notebook}: {len(list(numbers))}" for notebook, numbers in by_notebook)
    running = ", ".join(run.name for run in learner.runs if run.state == "running")
    failed = len(learner.runs) - learner.count(*WELL, "pending", "running")
    counts = [learner.count("done"), failed, learner.count("pending"), running]
    return [learner.folder.name, exercises, *counts, last_change(learner), round(learner.size / 2**20)]


def collect(students, file):
    """Write every learner's runs and right answers into one file."""
    facts = [asdict(learner) | {"folder": str(learner.folder)} for learner in students]
    try:
        Path(file).write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--collect {file} cannot be written: {error.strerror}; give another file") from None
    print(f"collected {sum(len(learner.runs) for learner in students)} runs in {file}")


def cancel(students) -> int:
    """Cancel what waits or runs: Slurm decides whose jobs one may cancel; on this machine, those of one's own."""
    status = 0
    for learner in students:
        for run in (run for run in learner.runs if run.state not in FINISHED):
            out, name = learner.folder / "runs" / run.name, f"{learner.folder.name}: job {run.job['id']} ({run.name})"
            try:
                if run.job["where"] != "this machine":
                    slurm.client("scancel", str(run.job["id"]))
                elif is_own(out):
                    make_job(run.job, out).cancel()
                else:
                    raise UserError(f"it runs on this machine, so only {learner.owner} can cancel it")
                print(f"{name} cancelled")
            except UserError as error:
                print(f"{name} goes on: {error}")
                status = 1
    return status
