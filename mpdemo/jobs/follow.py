"""Follow a job in a terminal until it ends: ``mpdemo follow runs/03_ddp``. In a notebook: ``await follow``.

To follow a job is to read its files and ask for its state. The job belongs to Slurm, or to the kernel that started it,
so Ctrl-C ends the command here and leaves the job running.
"""

import json
import math
import os
import shlex
import sys
import time
from pathlib import Path

from mpdemo.jobs.job import RECORD
from mpdemo.jobs.submit import attach

PAUSE = 0.1  # s between two looks
STATUS = {"done": 0, "stopped": 3}  # exit status by the job's last state; 1 for any other
INTERRUPTED = 130


def add_arguments(parser):
    """Declare the command's options."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run: runs/03_ddp")


def main(args) -> int:
    """Print the job's states and its log until it ends; Ctrl-C prints how to follow it again."""
    job = attach(os.path.abspath(args.run) if Path(args.run, RECORD).exists() else args.run)
    seen = None
    read = {}
    try:
        for _ in job.waiting(math.inf, math.inf):
            if seen != (seen := (job.state, job.queue)):
                print(line_of(job), flush=True)
            print(*new_text(job, read), sep="", end="", flush=True)
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        print(f"\nmpdemo: {detached(job)}", file=sys.stderr)
        return INTERRUPTED
    rest = "".join(new_text(job, read, whole=True))
    print(rest, end="" if rest.endswith("\n") or not rest else "\n")
    print(line_of(job))
    if job.log_files and job.state not in (*STATUS, "cancelled"):
        print(f"Why? mpdemo explain {shlex.quote(str(job.log_files[-1]))}")
    return STATUS.get(job.state, 1)


def line_of(job) -> str:
    """Return a job's number, place and state as one line."""
    place = f", position {job.queue} in the queue" if job.queue else ""
    ran = f" after {job.run_time:.1f} s" if job.finished else ""
    return f"{job.title}: {job.answer}{place}{ran}"


def new_text(job, read, whole=False):
    """Yield what each log file holds beyond the bytes in `read`, up to the end of a line unless the `whole` is wanted.

    A progress bar ends its lines with a carriage return, and so moves in the terminal as well.
    """
    for file in job.log_files:
        with open(file, "rb") as log:
            log.seek(read.get(file, 0))
            new = log.read()
        new = new if whole else new[: max(new.rfind(b"\n"), new.rfind(b"\r")) + 1]
        read[file] = read.get(file, 0) + len(new)
        yield new.decode(errors="replace")


def detached(job) -> str:
    """Return what an interrupt says of a job that it has left running: how to follow it again, and how to end it."""
    number, _, cluster = job.id.partition(";")
    end = f"scancel --clusters={cluster} {number}" if cluster else f"scancel {number}"
    if not job.record.get("identity"):
        end = f"kill {number}; it also ends with the kernel that started it"
    return (
        f"job {number} ({job.name}) is still {job.state} on {job.where}. "
        f"Follow it again: await follow({json.dumps(job.folder)}) in a notebook, "
        f"mpdemo follow {shlex.quote(job.folder)} in a terminal. Cancel it: {end}."
    )
