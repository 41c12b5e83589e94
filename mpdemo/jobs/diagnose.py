"""Read a failed job's log: which process failed, with what exit status, and its last words."""

import re
from dataclasses import dataclass

LAST_LINES = 12
SRUN = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+))$", re.MULTILINE)
TORCHRUN = re.compile(
    r"^\s*(?:\d+: )?\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*(?:\d+: )?\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE
)
ROOT_CAUSE = "Root Cause"
STEPD = r"^(?:\s*\d+: )?slurmstepd(?:-\S+)?: error: "  # Slurm's own process beside each task
SLURM_SAYS = re.compile(STEPD + r"\*\*\* JOB .*?CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*", re.MULTILINE)
MEMORY = re.compile(
    STEPD + r".*(?:oom.kill|exceeded memory limit)|^srun: error: .*: Out Of Memory", re.IGNORECASE | re.MULTILINE
)
OWN_WORDS = re.compile(r"^(srun|slurmstepd\S*): |^\[W\d+ .*socket\.cpp")
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/")  # where torchrun's own report of a failure begins


@dataclass(frozen=True)
class Failure:
    """The process that failed first.

    Attributes
    ----------
    rank : int or None
        Its rank among all processes (with torchrun under Slurm: the rank torchrun names).
    exit_status : int or None
        Its exit status; above 128, a signal's number + 128.
    lines : tuple of str
        The last lines it wrote.
    """

    rank: int | None
    exit_status: int | None
    lines: tuple

    def __str__(self):
        who = "the job" if self.rank is None else f"rank {self.rank}"
        status = "failed" if self.exit_status is None else f"failed with exit status {self.exit_status}"
        return f"{who} {status}"


def failure(log, exit_status=None) -> Failure:
    """Find the process to blame in a job's log.

    Parameters
    ----------
    log : str
        The whole log.
    exit_status : int, optional
        The job's own status, for a log that names nobody.
    """
    by_torchrun = torchrun_failure(log)
    if by_torchrun:
        rank, status = by_torchrun
        # The label is the node's task, not the rank, so lines are not sorted by it.
        return Failure(rank, status, last_lines(log))
    found = [match for match in SRUN.finditer(log) if match[3] or not ended_by_slurm(match[4])]
    if found:
        task = int(re.match(r"\d+", found[0][2])[0])
        status = int(found[0][3]) if found[0][3] else signal_status(found[0][4])
        return Failure(task, status, last_lines(log, task))
    return Failure(None, exit_status, last_lines(log))


def torchrun_failure(log):
    """Return (rank, exit status) of torchrun's root cause, or None."""
    start = log.find(ROOT_CAUSE)
    match = TORCHRUN.search(log, start) if start >= 0 else None
    if not match:
        return None
    status = int(match[2])
    return int(match[1]), status if status >= 0 else 128 - status


def ended_by_slurm(words) -> bool:
    """Whether a task was only ended because another had failed."""
    return bool(re.search(r"Terminated|Killed", words or ""))


def signal_status(words) -> int | None:
    names = {
        "Aborted": 134,
        "Segmentation fault": 139,
        "Bus error": 135,
        "Killed": 137,
        "Terminated": 143,
        "Out Of Memory": 137,
    }
    return next((status for name, status in names.items() if name in words), None)


def last_lines(log, task=None) -> tuple:
    """The last lines that a task wrote (``srun --label`` numbers them), without the launcher's own words."""
    lines = log.splitlines()
    label = re.compile(r"^\s*(\d+): ?(.*)$")
    labelled = [(int(m[1]), m[2]) for m in map(label.match, lines) if m]
    if task is not None and any(number == task for number, _ in labelled):
        lines = [text for number, text in labelled if number == task]
    elif labelled and task is None:
        lines = [m[2] if (m := label.match(line)) else line for line in lines]
    report = next((number for number, line in enumerate(lines) if TORCHRUN_REPORT.search(line)), len(lines))
    lines = [line for line in lines[:report] if line.strip() and not OWN_WORDS.search(line)]
    return tuple(lines[-LAST_LINES:])


def stopped_with_checkpoint(log, exit_status) -> bool:
    """Whether the training ended early on purpose: status 3 of every process, or torchrun's answer to our signal."""
    if exit_status == 3:
        return True
    found = failure(log).exit_status
    return found == 3 or "got signal: 10" in log


def out_of_memory(log) -> bool:
    """Whether Slurm says in the log that it, or the kernel, ended a task for its memory."""
    return bool(MEMORY.search(log))


def slurm_verdict(log) -> str | None:
    """The state that Slurm wrote into the job's own log as it ended it; None if it wrote nothing."""
    match = SLURM_SAYS.search(log)
    if not match:
        return "out_of_memory" if out_of_memory(log) else None
    return {"TIME LIMIT": "timeout", "NODE FAILURE": "node_failure"}.get(match[1], "cancelled")
