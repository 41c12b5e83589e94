"""Slurm's command-line clients: bounded in time, with output in our own format; its states, refusals, times translated.

Our own code: the Python clients need Slurm's library or its REST service, which few sites offer. A job is followed
without accounting (sacct), which many sites lack, and the formats are given with ``-o``, since ``--json`` differs
between Slurm's versions. Works from Slurm 20 on.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.world.processes import child_environment

TIMEOUT = 15  # seconds for one answer: a controller that is down lets the clients wait 9 s
# sbatch takes them for options, and they count more than the file's: people set them for a course's day.
OF_THE_USER = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION")
SILENT = (
    *(
        "Unable to contact slurm controller",
        "Socket timed out",
        "Connection refused",
        "Connection timed out",
    ),
    # scontrol show config says it of a controller that has just gone, below all it had told before
    "is DOWN",
)
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
ENOUGH = 2**20  # bytes of a log, at its end, in which launchers say how it ended
# In a log: the exit status of the process that failed first, as mpdemo.world.supervisor, srun and torchrun report it.
FIRST_STATUS = re.compile(
    r"^mpdemo: rank \d+ of \d+ ended with exit status (\d+)$|^srun: error: \S+: tasks? \S+: Exited with exit code (\d+)"
    r"|Root Cause.{0,2000}?^\W{0,40}(?:\d+: )?\s{0,40}exitcode\s{0,40}:\s{0,40}(-?\d+)",
    re.MULTILINE | re.DOTALL,
)
SLURMSTEPD = r"^(?: *\d+: )?slurmstepd(?:-\S+)?: error: "  # Slurm's own process beside each task
MEMORY = re.compile(
    SLURMSTEPD + r".*(?:oom.kill|exceeded memory limit)|^srun: error: .*: Out Of Memory",
    re.IGNORECASE | re.MULTILINE,
)


class SlurmError(UserError):
    """Slurm refused or did not answer: with Slurm's own message and the likely cause."""


class NoAnswer(SlurmError):
    """Slurm's controller is slow, down or restarting; nothing is known of the jobs, which may still run."""


class Answer(NamedTuple):
    """What is known of a job: our name for its state, the reason, its exit status and run time (s)."""

    state: str
    reason: str = ""
    exit_status: int | None = None
    run_time: float = 0.0

    def __str__(self) -> str:
        """State, reason and status, as ``failed (NonZeroExitCode), exit status 7``."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.state}{reason}" + (f", exit status {self.exit_status}" if self.exit_status else "")


def in_reach() -> bool:
    """Whether jobs can be submitted from here: the clients are installed and know a cluster.

    `SlurmError` where ``SLURM_CONF`` names a file that is not there: every client would hang for a minute.
    """
    if not shutil.which("sbatch"):
        return False
    conf = os.environ.get("SLURM_CONF")
    if conf and Path(conf).exists():
        return True
    if conf:
        raise SlurmError(
            f"SLURM_CONF = {conf!r}: no such file; do: unset SLURM_CONF, or start that cluster"
        )
    try:
        done = run("scontrol", "ping")
    except subprocess.TimeoutExpired:
        return True  # it has a configuration; the next client will report who does not answer
    return not re.search("configuration source|SlurmctldHost|Unable to process configuration", done.stderr)


def run(*command, **options) -> subprocess.CompletedProcess:
    """Run a client outside the job that may surround a notebook: sbatch would take that job's variables for options."""
    environment = child_environment("SLURM_CONF", *OF_THE_USER)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if cluster := next(
        (word.partition(";")[2] for word in command if re.fullmatch(r"\d+;[\w-]+", word)), ""
    ):
        command = [
            command[0],
            f"--clusters={cluster}",
            *(word.removesuffix(f";{cluster}") for word in command[1:]),
        ]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT, **options
    )


def number(job_id) -> str:
    """Return ``7`` of ``7;alex``, which is what sbatch calls a job that it sent to another cluster."""
    return job_id.partition(";")[0]


def none_in_reach() -> str:
    """Say that there is no Slurm, and which other batch system there is."""
    others = {"qsub": "PBS (qsub)", "bsub": "LSF (bsub)", "flux": "Flux"}
    here = next((name for program, name in others.items() if shutil.which(program)), "")
    return f"{here} is here, but this course speaks Slurm" if here else "Slurm not found"


def client(*command, **options) -> str:
    """Run one of Slurm's commands and return what it prints; `SlurmError` with its own message and the likely cause."""
    try:
        done = run(*command, **options)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not installed here") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]}: no answer from Slurm within {TIMEOUT} s; try again later") from None
    if done.returncode:
        said = done.stderr or "\n".join(
            line for line in done.stdout.splitlines() if not re.search(" = |[*]{3}", line)
        )
        lines = [line.split("error: ", 1)[-1].strip() for line in said.splitlines() if line.strip()]
        message = f"{command[0]}: " + ("; ".join(dict.fromkeys(lines)) or "no reason given")
        if any(text in said for text in SILENT):
            raise NoAnswer(f"{message}; try again later")
        raise SlurmError(message)
    return done.stdout


def configuration() -> dict:
    """``scontrol show config`` as a dictionary."""
    rows = (line.partition("=") for line in client("scontrol", "show", "config").splitlines())
    return {key.strip(): value.strip() for key, _, value in rows if value}


def cluster_name() -> str | None:
    """Slurm's name for the cluster that answers here; None if it does not answer."""
    try:
        return configuration().get("ClusterName")
    except SlurmError:
        return None


def identity() -> str:
    """A text that only this cluster has: two clusters of one name (and job numbers from 1) must not be mixed up."""
    config = configuration()
    host = config.get("SlurmctldHost[0]") or config.get("ControlMachine", "")
    return f"{config.get('ClusterName')} {host} {config.get('SlurmctldPort')} {config.get('StateSaveLocation')}"


def make_answer(slurm_state, reason, exit_code, run_time) -> Answer:
    """Translate Slurm's state, its ``STATUS:SIGNAL`` and its run time (INVALID where its machines' clocks differ)."""
    state = STATES.get(re.split(r"[ +,]", slurm_state)[0], "unknown")
    status, _, signal = exit_code.partition(":")
    exit_status = int(status) if status.isdigit() else None
    if signal.isdigit() and int(signal) and exit_status == 0:
        exit_status = 128 + int(signal)
    if state == "failed" and signal == "125":  # the batch shell's mark of the out-of-memory killer
        state = "out_of_memory"
    if slurm_state.startswith("PREEMPTED"):
        reason = "a more urgent job took its nodes"
    ran = float(seconds(run_time)) if re.match(r"\d", run_time) else 0.0
    return Answer(state, "" if reason == "None" else reason, exit_status, ran)


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


def seconds(text) -> int:
    """Return the seconds of a time as Slurm reads it: ``MM``, ``MM:SS``, ``D-HH`` and so on; or `ValueError`."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if not match:
        raise ValueError("is no time; allowed: HH:MM:SS or D-HH:MM:SS, as in 00:10:00")
    days, *fields = match.groups()
    numbers = [int(field) for field in fields if field is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # without days and hours, the first number is the minutes
    hours, minutes, rest = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def limit(text) -> int:
    """Return the seconds of a time limit; `ValueError` also for 0, which Slurm takes for no limit at all."""
    if not (total := seconds(text)):
        raise ValueError("is no time at all; give at least one second, as in 00:10:00")
    return total
