"""``python -m mpdemo class``: who has come how far, in one table; cancel what still runs; collect the summaries.

    python -m mpdemo class /path/to/learners
    python -m mpdemo class /path/to/learners --collect class.json
    python -m mpdemo class /path/to/learners --cancel        as root, an operator, or coordinator of the account

One row per learner's folder: exercises answered right and jobs by state, from their files and one call of squeue.
"""

import argparse
import json
import os
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from tabulate import tabulate

from mpdemo.classroom.learner import Queue, last_change, learners, look
from mpdemo.errors import UserError
from mpdemo.jobs import Job, slurm
from mpdemo.jobs.slurm_answers import STATES

COUNTED = ("done", "failed", "stopped", "cancelled", "unknown", "pending")
HEADERS = ("learner", "exercises right", *COUNTED, "running", "last change", "MiB in runs")
FAILED = ("failed", "timeout", "out_of_memory", "node_failure")


def add_arguments(parser):
    """Declare the arguments of ``mpdemo class``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="learners' folders, or one that holds them")
    parser.add_argument("--collect", metavar="FILE", help="write all runs with their summaries, as JSON")
    parser.add_argument("--cancel", action="store_true", help="cancel every job that waits or runs")


def main(args) -> int:
    """Print the table; return 1 where a job could not be cancelled, else 0."""
    queue = queue_of_all() if slurm.in_reach() else Queue()
    students = [look(folder, queue) for folder in learners(args.folders)]
    names = names_of(students)
    rows = [row(name, learner) for name, learner in zip(names, students, strict=True)]
    print(tabulate(rows, HEADERS, "simple", disable_numparse=True))
    if any(learner.count("unknown") for learner in students):
        print("unknown: jobs that Slurm does not show from here, or that another machine runs")
    if args.collect:
        collect(students, args.collect)
    return cancel(names, students) if args.cancel else 0


def queue_of_all() -> Queue:
    """Return the jobs that Slurm has now and the user may see. Asks once."""
    lines = slurm.client("squeue", "--noheader", "-o", "%i|%U|%T").split()
    jobs = {}
    for number, user, state in (line.split("|") for line in lines):
        jobs[number] = int(user), STATES.get(state, "unknown")
    return Queue(slurm.identity(), jobs)


def names_of(students) -> list[str]:
    """Return what to call the learners: their folders, below the one that all have in common."""
    if len(students) == 1:
        return [students[0].folder.name]
    common = os.path.commonpath([learner.folder for learner in students])
    return [os.path.relpath(learner.folder, common) for learner in students]


def row(name, learner) -> list:
    """Return a learner's row of the table."""
    by_notebook = groupby(learner.exercises, key=lambda number: number.partition(".")[0])
    exercises = ", ".join(f"{notebook}: {len(list(numbers))}" for notebook, numbers in by_notebook)
    running = ", ".join(run.name for run in learner.runs if run.state == "running")
    counts = [learner.count(*(FAILED if state == "failed" else (state,))) for state in COUNTED]
    return [name, learner.problem or exercises, *counts, running, last_change(learner), round(learner.size / 2**20)]


def collect(students, file):
    """Write every learner's runs and right answers into one file."""
    facts = [asdict(learner) | {"folder": str(learner.folder)} for learner in students]
    try:
        Path(file).write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--collect {file} cannot be written: {error.strerror}; give another file") from None
    print(f"collected {sum(len(learner.runs) for learner in students)} runs in {file}")


def cancel(names, students) -> int:
    """Cancel what waits or runs: Slurm decides whose jobs one may cancel; on this machine, those of one's own."""
    status = 0
    for student, learner in zip(names, students, strict=True):
        for run in (run for run in learner.runs if run.state in ("pending", "running")):
            out, name = learner.folder / "runs" / run.name, f"{student}: job {run.job['id']} ({run.name})"
            try:
                if run.job.get("identity"):
                    slurm.client("scancel", str(run.job["id"]))  # a number that squeue printed
                elif out.stat().st_uid == os.getuid():
                    Job(run.job, out).cancel()
                else:
                    raise UserError(f"it runs on this machine, so only {learner.owner} can cancel it")
                print(f"{name} cancelled")
            except UserError as error:
                print(f"{name} goes on: {error}")
                status = 1
    return status
