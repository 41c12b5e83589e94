"""Read a failed job's log: which process failed, with what exit status, and its last output."""

import re
from dataclasses import dataclass

LAST_LINES = 12
SRUN = re.compile(r"^srun: error: \S+: tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|(.+))$", re.MULTILINE)
TORCHRUN = re.compile(  # in its report, the process that failed first
    r"Root Cause.*?^\s*(?:\d+: )?\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*(?:\d+: )?\s*exitcode\s*:\s*(-?\d+)",
    re.MULTILINE | re.DOTALL,
)
SLURMSTEPD = r"^(?:\s*\d+: )?slurmstepd(?:-\S+)?: error: "  # Slurm's own process beside each task
CANCELLED = re.compile(SLURMSTEPD + r"\*\*\* JOB .*?CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*", re.MULTILINE)
MEMORY = re.compile(
    SLURMSTEPD + r".*(?:oom.kill|exceeded memory limit)|^srun: error: .*: Out Of Memory", re.IGNORECASE | re.MULTILINE
)
LABEL = re.compile(r"^\s*(\d+): ?(.*)$")  # srun --label writes the task's number before each line
LAUNCHER_LINE = re.compile(r"^(srun|slurmstepd\S*): |^\[W\d+ .*socket\.cpp")
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/")  # where torchrun's own report of a failure begins
# How srun names the signal that ended a task.
SIGNAL_STATUS = {"Aborted": 134, "Segmentation fault": 139, "Bus error": 135, "Out Of Memory": 137}


NO_PROGRAM = (
    "there is no program {0!r} on the compute node; activate its environment before the job is submitted, or write the "
    "lines that do so into setup of the site file"
)
CAUSES = {  # a line of the log -> what it means and what to do; {0} is what the pattern's brackets hold
    r"^setup line failed with exit status \d+: (.*)$": "the line {0!r} in setup of the site file failed",
    r"execve\(\): (.+?): No such file or directory": NO_PROGRAM,  # srun found none
    r"(?:bash|task|torchrun): line \d+: exec: (.+?): not found": NO_PROGRAM,  # the shell in each task found none
}
OUT_OF_MEMORY = "out of memory; ask for more (memory in the site file), or take smaller batches or fewer processes"


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
    cause : str
        What the launcher, Slurm or the job file said of it, and what to do; empty if they said nothing.
    """

    rank: int | None
    exit_status: int | None
    lines: tuple
    cause: str = ""

    def __str__(self):
        who = "the job" if self.rank is None else f"rank {self.rank}"
        status = "failed" if self.exit_status is None else f"failed with exit status {self.exit_status}"
        return f"{who} {status}" + (f": {self.cause}" if self.cause else "")


def failure(log, exit_status=None) -> Failure:
    """Find the process to blame in a job's log.

    Parameters
    ----------
    log : str
        The whole log.
    exit_status : int, optional
        The job's own status, for a log that names nobody.
    """
    match = TORCHRUN.search(log)
    if match:
        rank, status = int(match[1]), int(match[2])
        # The label is the node's task, not the rank, so lines are not selected by it.
        return Failure(rank, status if status >= 0 else 128 - status, last_lines(log), cause(log))
    for match in SRUN.finditer(log):
        if match[2] or not re.search("Terminated|Killed", match[3]):  # those were ended because another had failed
            rank = int(match[1])
            by_signal = next((status for name, status in SIGNAL_STATUS.items() if name in (match[3] or "")), None)
            return Failure(rank, int(match[2]) if match[2] else by_signal, last_lines(log, rank), cause(log))
    return Failure(None, exit_status, last_lines(log), cause(log))


def cause(log) -> str:
    """What somebody other than the program said of a failure: no program, a failed setup line, no memory."""
    for pattern, text in CAUSES.items():
        if match := re.search(pattern, log, re.MULTILINE):
            return text.format(match[1])
    return OUT_OF_MEMORY if out_of_memory(log) else ""


def last_lines(log, task=None) -> tuple:
    """The last lines that a task wrote (of all tasks where it wrote none), without the launcher's own messages."""
    lines = log.splitlines()
    matches = [LABEL.match(line) for line in lines]
    if task is not None:
        lines = [match[2] for match in matches if match and int(match[1]) == task] or lines
    else:
        lines = [match[2] if match else line for match, line in zip(matches, lines, strict=True)]
    report = next((number for number, line in enumerate(lines) if TORCHRUN_REPORT.search(line)), len(lines))
    lines = [line for line in lines[:report] if line.strip() and not LAUNCHER_LINE.search(line)]
    return tuple(lines[-LAST_LINES:])


def stopped_with_checkpoint(log, exit_status) -> bool:
    """Whether the training ended early on purpose: status 3 of every process, or torchrun's answer to our signal."""
    return exit_status == 3 or failure(log).exit_status == 3 or "got signal: 10" in log


def out_of_memory(log) -> bool:
    """Whether Slurm reports in the log that it, or the kernel, ended a task for its memory."""
    return bool(MEMORY.search(log))


def state_by_status(log, exit_status) -> str:
    """The state of a job that ended by itself: done, stopped or failed."""
    if exit_status == 0:
        return "done"
    return "stopped" if stopped_with_checkpoint(log, exit_status) else "failed"


def state_by_slurm(log) -> str | None:
    """The state that Slurm wrote into the job's own log as it ended it; None if it wrote nothing."""
    match = CANCELLED.search(log)
    if not match:
        return "out_of_memory" if out_of_memory(log) else None
    return {"TIME LIMIT": "timeout", "NODE FAILURE": "node_failure"}.get(match[1], "cancelled")
