"""Read a failed job's log: which process failed, with what exit status, and its last output."""

import re
from dataclasses import dataclass

from mpdemo.jobs.explain import said_by

LAST_LINES = 12
# How launchers report the process that failed first: its rank, and its exit status where they say it.
OURS = re.compile(r"^mpdemo: rank (\d+) of \d+ ended with exit status (\d+)$", re.MULTILINE)  # mpdemo.world.supervisor
TORCHRUN = re.compile(
    r"Root Cause.*?^\s*(?:\d+: )?\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*(?:\d+: )?\s*exitcode\s*:\s*(-?\d+)",
    re.MULTILINE | re.DOTALL,
)
# But for those that were ended because another had failed.
SRUN = re.compile(
    r"^srun: error: \S+: tasks? (\d+)[\d,-]*: (?!.*(?:Terminated|Killed))(?:Exited with exit code (\d+))?", re.MULTILINE
)
SLURMSTEPD = r"^(?:\s*\d+: )?slurmstepd(?:-\S+)?: error: "  # Slurm's own process beside each task
CANCELLED = re.compile(SLURMSTEPD + r"\*\*\* JOB .*?CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*", re.MULTILINE)
MEMORY = re.compile(
    SLURMSTEPD + r".*(?:oom.kill|exceeded memory limit)|^srun: error: .*: Out Of Memory", re.IGNORECASE | re.MULTILINE
)
LABEL = re.compile(r"^\s*(\d+): ?(.*)$")  # srun --label writes the task's number before each line
LAUNCHER_LINE = re.compile(r"^(srun|slurmstepd\S*): |^\[W\d+ .*socket\.cpp")
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/")  # where torchrun's own report of a failure begins


@dataclass(frozen=True)
class Failure:
    """The process that failed first."""

    rank: int | None  # among all processes
    exit_status: int | None  # above 128, a signal's number + 128
    lines: tuple  # the last that it wrote
    cause: str = ""  # what the launcher, Slurm or the batch script said of it, and what to do

    def __str__(self):
        who = "the job" if self.rank is None else f"rank {self.rank}"
        status = "failed" if self.exit_status is None else f"failed with exit status {self.exit_status}"
        return f"{who} {status}" + (f": {self.cause}" if self.cause else "")


def failure(log, exit_status=None) -> Failure:
    """Find the process to blame in a job's whole log; `exit_status` is the job's own, for a log that names none."""
    by_srun, rank = None, None
    if match := OURS.search(log) or TORCHRUN.search(log) or (by_srun := SRUN.search(log)):
        rank, exit_status = int(match[1]), int(match[2]) if match[2] else exit_status
    if exit_status is not None and exit_status < 0:
        exit_status = 128 - exit_status
    # Under torchrun the label is the node's task, not the rank, so lines are not selected by it.
    return Failure(rank, exit_status, last_lines(log, rank if by_srun else None), cause(log))


def cause(log) -> str:
    """Return what a launcher said of a failure, and what to do: no program, a failed setup line, no memory."""
    found = ((known, known.pattern.search(log)) for known in said_by("launcher"))
    return next((f"{known.what_of(match[0])}; {known.do}" for known, match in found if match), "")


def last_lines(log, task=None) -> tuple:
    """Return the last lines that a task wrote (of all tasks where it wrote none), without the launcher's messages."""
    lines, own = log.splitlines(), []
    if task is not None:
        own = [match[2] for match in map(LABEL.match, lines) if match and int(match[1]) == task]
    lines = own or [LABEL.sub(r"\2", line) for line in lines]
    report = next((number for number, line in enumerate(lines) if TORCHRUN_REPORT.search(line)), len(lines))
    lines = [line for line in lines[:report] if line.strip()]
    own = [line for line in lines if not LAUNCHER_LINE.search(line)]
    return tuple((own or lines)[-LAST_LINES:])  # of a step that Slurm refused: why


def stopped_with_checkpoint(log, exit_status) -> bool:
    """Whether the training ended early on purpose: status 3 of every process, or torchrun's answer to our signal."""
    return exit_status == 3 or failure(log).exit_status == 3 or "got signal: 10" in log


def state_by_status(log, exit_status) -> str:
    """Return the state of a job that ended by itself: done, stopped or failed."""
    if exit_status == 0:
        return "done"
    return "stopped" if stopped_with_checkpoint(log, exit_status) else "failed"


def state_by_slurm(log) -> str | None:
    """Return the state that Slurm wrote into the job's own log as it ended it; None if it wrote nothing."""
    if match := CANCELLED.search(log):
        return {"TIME LIMIT": "timeout", "NODE FAILURE": "node_failure"}.get(match[1], "cancelled")
    return "out_of_memory" if MEMORY.search(log) else None
