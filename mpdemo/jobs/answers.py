"""What Slurm's commands answer, in our words: the states of a job, and the likely cause of a refusal."""

import re
from dataclasses import dataclass

# Slurm's words, and what they mean to somebody who has not met them.
CAUSES = {
    "Invalid feature specification": "no node has that constraint; see: sinfo -o '%N %f'",
    "nvalid partition": "there is no such partition; see: sinfo -o '%P %l'",
    "nvalid account": "no such account, or not yours; see: sacctmgr show associations user=$USER",
    "nvalid qos": "no such qos, or not yours; see: sacctmgr show qos",
    "Requested reservation is invalid": "no such reservation, or not yours, or over; see: scontrol show reservation",
    "CPU count per node can not be satisfied": "more CPUs than a node has: fewer processes or CPUs per process",
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

STATES = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_FED": "pending",
    "REQUEUE_HOLD": "pending",
    "SPECIAL_EXIT": "pending",
    "RESV_DEL_HOLD": "pending",
    "RUNNING": "running",
    "COMPLETING": "running",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "COMPLETED": "done",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "PREEMPTED": "cancelled",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "out_of_memory",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "LAUNCH_FAILED": "failed",
}


@dataclass(frozen=True)
class Answer:
    """What Slurm says of a job: our word for its state, Slurm's reason, exit status and run time (s)."""

    state: str
    reason: str = ""
    exit_status: int | None = None
    run_time: float = 0.0


def explain(command, words) -> str:
    """Return Slurm's own words in one line, with the likely cause where we know it."""
    lines = [line.split("error: ", 1)[-1].strip() for line in words.splitlines() if line.strip()]
    said = "; ".join(dict.fromkeys(lines)) or "no reason given"
    cause = next((cause for pattern, cause in CAUSES.items() if pattern in words), None)
    return f"{command}: {said}" + (f". Likely cause: {cause}" if cause else "")


def parse_scontrol(line) -> Answer:
    """Read ``scontrol show job -o``. The job's name may hold anything, so fields are sought after it."""
    fields = line[line.index(" UserId=") :] if " UserId=" in line else line

    def field(name):
        match = re.search(rf" {name}=(\S*)", fields)
        return match[1] if match else ""

    status, _, signal = field("ExitCode").partition(":")
    return make_answer(field("JobState"), field("Reason"), status, signal, field("RunTime"))


def make_answer(slurm_state, reason, status, signal, run_time) -> Answer:
    word = re.split(r"[ +,]", slurm_state)[0]
    state = STATES.get(word, "unknown")
    code = int(status) if status.isdigit() else None
    if signal.isdigit() and int(signal) and code == 0:
        code = 128 + int(signal)
    if state == "failed" and signal == "125":  # the batch shell's mark of the out-of-memory killer
        state = "out_of_memory"
    return Answer(state, "" if reason == "None" else reason, code, duration(run_time))


def duration(text) -> float:
    """Read ``[D-]HH:MM:SS`` or plain seconds.

    >>> duration("1-00:00:10"), duration("00:01:30"), duration("7")
    (86410.0, 90.0, 7.0)
    """
    days, _, rest = text.rpartition("-")
    total = 0
    for part in rest.split(":"):
        total = total * 60 + (int(part) if part.isdigit() else 0)
    return float(total + 86400 * int(days if days.isdigit() else 0))
