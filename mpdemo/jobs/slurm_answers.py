"""What Slurm's commands answer, translated: the states of a job, and the likely cause of a refusal.

Kept by hand: the Python clients for Slurm need its library or its REST service, which few sites offer.
"""

import re
from typing import NamedTuple

from mpdemo.jobs import times
from mpdemo.jobs.explain import said_by

# Our state -> Slurm's.
SLURM_STATES = {
    "pending": "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
    "running": "RUNNING COMPLETING SUSPENDED STOPPED RESIZING SIGNALING STAGE_OUT",
    "done": "COMPLETED",
    "failed": "FAILED LAUNCH_FAILED",
    "cancelled": "CANCELLED PREEMPTED REVOKED",
    "timeout": "TIMEOUT DEADLINE",
    "out_of_memory": "OUT_OF_MEMORY",
    "node_failure": "NODE_FAIL BOOT_FAIL",
}
STATES = {slurm_state: state for state, names in SLURM_STATES.items() for slurm_state in names.split()}


class Answer(NamedTuple):
    """What is known of a job: our name for its state, the reason, its exit status and run time (s)."""

    state: str
    reason: str = ""
    exit_status: int | None = None
    run_time: float = 0.0


def explain(command, stderr) -> str:
    """Return Slurm's message in one line, with the likely cause where we know it."""
    lines = [line.split("error: ", 1)[-1].strip() for line in stderr.splitlines() if line.strip()]
    message = "; ".join(dict.fromkeys(lines)) or "no reason given"
    known = next((known for known in said_by("slurm") if known.pattern.search(stderr)), None)
    return f"{command}: {message}" + (f". Likely cause: {known.what}; {known.do}" if known else "")


def fields_of(line) -> dict:
    """Read ``scontrol show job -o``. The job's name may hold anything, so only the fields after it are read."""
    text = line[line.index(" UserId=") :] if " UserId=" in line else line
    return dict(reversed(re.findall(r" (\w+)=(\S*)", text)))  # the first of a name counts: paths come last


def parse_scontrol(line) -> Answer:
    """Translate what ``scontrol show job -o`` says of a job."""
    fields = fields_of(line)
    run_time = seconds_of(fields.get("RunTime", ""))
    return make_answer(fields.get("JobState", ""), fields.get("Reason", ""), fields.get("ExitCode", ""), run_time)


def seconds_of(run_time) -> float:
    """Return a run time in seconds; 0 for INVALID, which Slurm prints where the clocks of its machines differ."""
    try:
        return times.seconds(run_time)
    except ValueError:
        return 0.0


def make_answer(slurm_state, reason, exit_code, run_time) -> Answer:
    """Translate Slurm's state and its ``STATUS:SIGNAL``; a run time is in seconds."""
    state = STATES.get(re.split(r"[ +,]", slurm_state)[0], "unknown")
    status, _, signal = exit_code.partition(":")
    exit_status = int(status) if status.isdigit() else None
    if signal.isdigit() and int(signal) and exit_status == 0:
        exit_status = 128 + int(signal)
    if state == "failed" and signal == "125":  # the batch shell's mark of the out-of-memory killer
        state = "out_of_memory"
    if slurm_state.startswith("PREEMPTED"):
        reason = "a more urgent job took its nodes"
    return Answer(state, "" if reason == "None" else reason, exit_status, float(run_time))
