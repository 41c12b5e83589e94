"""How a job ended, by what launchers and Slurm write into its log."""

import re

# The exit status of the process that failed first, as launchers report it: mpdemo.world.supervisor, srun, torchrun.
FIRST_STATUS = re.compile(
    r"^mpdemo: rank \d+ of \d+ ended with exit status (\d+)$|^srun: error: \S+: tasks? \S+: Exited with exit code (\d+)"
    r"|Root Cause.{0,2000}?^\W*(?:\d+: )?\s*exitcode\s*:\s*(-?\d+)",
    re.MULTILINE | re.DOTALL,
)
SLURMSTEPD = r"^(?:\s*\d+: )?slurmstepd(?:-\S+)?: error: "  # Slurm's own process beside each task
CANCELLED = re.compile(SLURMSTEPD + r"\*\*\* JOB .*?CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*", re.MULTILINE)
MEMORY = re.compile(
    SLURMSTEPD + r".*(?:oom.kill|exceeded memory limit)|^srun: error: .*: Out Of Memory", re.IGNORECASE | re.MULTILINE
)


def state_by_status(log, exit_status) -> str:
    """Return the state of a job that ended by itself: done, out_of_memory, failed or stopped with a checkpoint.

    The last is status 3 of the processes, which torchrun hides, or torchrun's answer to our signal.
    """
    if exit_status == 0:
        return "done"
    first = FIRST_STATUS.search(log)
    if exit_status == 3 or (first and first[first.lastindex] == "3") or "got signal: 10" in log:
        return "stopped"
    return "out_of_memory" if MEMORY.search(log) else "failed"


def state_by_slurm(log) -> str | None:
    """Return the state that Slurm wrote into the job's own log as it ended it; None if it wrote nothing."""
    if match := CANCELLED.search(log):
        return {"TIME LIMIT": "timeout", "NODE FAILURE": "node_failure"}.get(match[1], "cancelled")
    return "out_of_memory" if MEMORY.search(log) else None
