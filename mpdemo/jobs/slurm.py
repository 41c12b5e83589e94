"""Slurm's command-line clients: bounded in time, with output in our own format and their refusals translated.

Kept by hand: a job is followed without accounting (sacct), which many sites lack, and the formats are given with
``-o`` and ``-P``, since ``--json`` differs between Slurm's versions. Works from Slurm 20 on.
"""

import os
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.jobs.slurm_answers import Answer, explain, fields_of, make_answer, parse_scontrol
from mpdemo.world.processes import child_environment

TIMEOUT = 15  # seconds for one answer: a controller that is down lets the clients wait 9 s

# sbatch takes them for options, and they count more than the file's: people set them for a course's day.
OF_THE_USER = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION")


class SlurmError(UserError):
    """Slurm refused or did not answer: with Slurm's own message and the likely cause."""


class NoAnswer(SlurmError):
    """Slurm's controller is slow, down or restarting; nothing is known of the jobs, which may well go on."""


SILENT = (
    *("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Connection timed out"),
    "is DOWN",  # scontrol show config says it of a controller that has just gone, below all it had told before
)


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
        raise SlurmError(f"SLURM_CONF = {conf!r}: no such file; do: unset SLURM_CONF, or start that cluster")
    try:
        done = run("scontrol", "ping")
    except subprocess.TimeoutExpired:
        return True  # it has a configuration; the next client will report who does not answer
    return not re.search("configuration source|SlurmctldHost|Unable to process configuration", done.stderr)


def run(*command, **options) -> subprocess.CompletedProcess:
    """Run a client outside the job that may surround a notebook: sbatch would take that job's variables for options."""
    environment = child_environment("SLURM_CONF", *OF_THE_USER)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT, **options)


def client(*command, **options) -> str:
    """Run one of Slurm's commands and return what it prints; `options` are those of `subprocess.run`.

    `SlurmError` with Slurm's own message and the likely cause; `NoAnswer` also when none came within 15 s.
    """
    try:
        done = run(*command, **options)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not installed here") from None
    except subprocess.TimeoutExpired:
        message = f"{command[0]}: no answer from Slurm within {TIMEOUT} s; try again later, or ask the site"
        raise NoAnswer(message) from None
    if done.returncode:
        said = done.stderr or "\n".join(line for line in done.stdout.splitlines() if not re.search(" = |[*]{3}", line))
        kind = NoAnswer if any(text in said for text in SILENT) else SlurmError
        raise kind(explain(command[0], said))
    return done.stdout


def cluster_name() -> str | None:
    """Slurm's name for the cluster in reach; None if it does not answer."""
    try:
        return configuration().get("ClusterName")
    except SlurmError:
        return None


def configuration() -> dict:
    """``scontrol show config`` as a dictionary."""
    rows = (line.partition("=") for line in client("scontrol", "show", "config").splitlines())
    return {key.strip(): value.strip() for key, _, value in rows if value}


def identity() -> str:
    """A text that only this cluster has: two clusters of one name (and job numbers from 1) must not be mixed up."""
    config = configuration()
    host = config.get("SlurmctldHost[0]") or config.get("ControlMachine", "")
    return f"{config.get('ClusterName')} {host} {config.get('SlurmctldPort')} {config.get('StateSaveLocation')}"


def sbatch(script, cwd, *options) -> str:
    """Submit a file and return the job's number."""
    answer = client("sbatch", "--parsable", *options, str(script), cwd=cwd)
    return answer.strip().splitlines()[-1].split(";")[0]


def ask(job_id) -> Answer | None:
    """Return what Slurm knows of a job; None once it has forgotten it. Absence is not success.

    The controller remembers a job for a few minutes after its end (``MinJobAge``), accounting for long, if it is on.
    """
    try:
        return parse_scontrol(client("scontrol", "show", "job", "-o", job_id))
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
    return ask_accounting(job_id)


def seconds_in_queue(job_id) -> float | None:
    """Return how long a job waited before it started; None if it never did, or Slurm has forgotten it."""
    try:
        fields = fields_of(client("scontrol", "show", "job", "-o", job_id))
        submitted, started = (datetime.fromisoformat(fields[name]) for name in ("SubmitTime", "StartTime"))
    except (SlurmError, KeyError, ValueError):  # "Unknown" is no time
        return None
    return (started - submitted).total_seconds()


def ask_accounting(job_id) -> Answer | None:
    """Ask ``sacct`` (also for a job completion file, where a site keeps one); None if there is no accounting."""
    for options in (("-X", "-o", "State,ExitCode,ElapsedRaw"), ("-c", "-o", "State,ExitCode")):
        try:
            rows = client("sacct", "-n", "-P", "-j", job_id, *options).splitlines()
        except SlurmError:
            continue
        if rows and rows[-1].split("|")[0]:
            state, exit_code, elapsed = (*rows[-1].split("|"), "")[:3]
            return make_answer(state, "", exit_code, float(elapsed or 0))
    return None
