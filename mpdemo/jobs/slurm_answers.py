"""What Slurm's commands answer, translated: the states of a job, and the likely cause of a refusal.

Kept by hand: the Python clients for Slurm need its library or its REST service, which few sites offer.
"""

import re
from dataclasses import dataclass

from mpdemo.jobs import times

# A part of Slurm's message -> its likely cause, for somebody who has not met it.
CAUSES = {
    "Invalid feature specification": "no node has that constraint; see: sinfo -o '%N %f'",
    "nvalid partition": "there is no such partition; see: sinfo -o '%P %l'",
    "nvalid account": "no such account, or not yours; see: sacctmgr show associations user=$USER",
    "nvalid qos": "no such qos, or not yours; see: sacctmgr show qos",
    "Requested reservation is invalid": "no such reservation, or not yours, or over; see: scontrol show reservation",
    "CPU count per node can not be satisfied": "more CPUs than a node has: fewer processes or CPUs per process",
    "Node count specification invalid": "more nodes than the partition has; see: sinfo -o '%P %D'",
    "Memory specification can not be satisfied": "more memory than a node has; see: sinfo -o '%N %m'",
    "Requested node configuration is not available": "no node has that many CPUs, GPUs or features together",
    "Invalid generic resource": "no GPUs under that name here: see gpus_per_node, gpu_type, gpu_syntax of the site",
    "More processors requested than permitted": "more CPUs than the partition lets one job have",
    "Requested time limit is invalid": "over the partition's time limit; see: sinfo -o '%P %l'",
    "DOS line breaks": "the file was saved on Windows: save it with Unix line ends",
    "Unable to contact slurm controller": "the controller does not answer: maintenance, or the wrong SLURM_CONF",
    "Zero Bytes were transmitted": "the controller does not know this machine's key: munge is down or has another key",
    "Invalid job id specified": "Slurm has forgotten the job, or it never was",
    "QOSMaxSubmitJobPerUserLimit": "too many jobs of yours are in the queue: wait for one to end",
    "AssocGrp": "the account's hours or limits are used up",
}

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


@dataclass(frozen=True)
class Answer:
    """What Slurm reports of a job: our name for its state, Slurm's reason, exit status and run time (s)."""

    state: str
    reason: str = ""
    exit_status: int | None = None
    run_time: float = 0.0


def explain(command, stderr) -> str:
    """Return Slurm's message in one line, with the likely cause where we know it."""
    lines = [line.split("error: ", 1)[-1].strip() for line in stderr.splitlines() if line.strip()]
    message = "; ".join(dict.fromkeys(lines)) or "no reason given"
    cause = next((cause for pattern, cause in CAUSES.items() if pattern in stderr), None)
    return f"{command}: {message}" + (f". Likely cause: {cause}" if cause else "")


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
