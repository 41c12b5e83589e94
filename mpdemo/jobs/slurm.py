"""Slurm's command-line clients: bounded, asked for text in our own format, their refusals translated.

Formats are given with ``-o`` and ``-P`` because ``--json`` differs between Slurm's versions and ignores filters in
some. Everything here works from Slurm 20 on.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.jobs.answers import Answer, explain, make_answer, parse_scontrol

PATIENCE = 15  # seconds for one answer: a controller that is down lets the clients wait 9 s


class SlurmError(UserError):
    """Slurm refused or did not answer; the message holds its own words and the likely cause."""


def in_reach() -> bool:
    """Whether jobs can be submitted from here: the clients are installed and know a cluster.

    Raises
    ------
    SlurmError
        ``SLURM_CONF`` names a file that is not there (every client would hang for a minute).
    """
    if not shutil.which("sbatch"):
        return False
    conf = os.environ.get("SLURM_CONF")
    if conf and Path(conf).exists():
        return True
    if conf:
        raise SlurmError(f"SLURM_CONF = {conf!r}: no such file; do: unset SLURM_CONF, or start that cluster")
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, env=environment(), timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return True  # it has a configuration; the next client will say who does not answer
    return not re.search("configuration source|SlurmctldHost|Unable to process configuration", done.stderr)


def environment() -> dict:
    """This process's environment for a client.

    A notebook inside a Slurm job carries that job's variables, which sbatch would take for options: they are removed.
    The directory of the running Python comes first, so that the job's ``python`` is this one.
    """
    kept = ("SLURM_CONF", "SBATCH_ACCOUNT")
    unwanted = ("SLURM", "SBATCH", "SRUN", "PMI", "CUDA_VISIBLE_DEVICES")
    env = {name: value for name, value in os.environ.items() if name in kept or not name.startswith(unwanted)}
    return env | {"PATH": f"{Path(sys.executable).parent}:{env.get('PATH', os.defpath)}"}


def client(*command, cwd=None, text=None) -> str:
    """Run one of Slurm's commands and return what it prints.

    Raises
    ------
    SlurmError
        With Slurm's own words and the likely cause; also when no answer came within 15 s.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(), cwd=cwd, input=text, timeout=PATIENCE
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not installed here") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]}: no answer from Slurm within {PATIENCE} s; try again later, or ask the site"
        ) from None
    if done.returncode:
        raise SlurmError(explain(command[0], done.stderr))
    return done.stdout or (done.stderr if "--test-only" in command else "")


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
    """Submit a file and return the job's id."""
    answer = client("sbatch", "--parsable", *options, str(script), cwd=cwd)
    return answer.strip().splitlines()[-1].split(";")[0]


def test_only(text, cwd) -> str | None:
    """Let Slurm check a file without submitting it; return its refusal, or None. (It answers on stderr.)"""
    try:
        client("sbatch", "--test-only", cwd=cwd, text=text)
    except SlurmError as refusal:
        return str(refusal)
    return None


def scancel(job_id):
    client("scancel", str(job_id))


def ask(job_id) -> Answer | None:
    """Return what Slurm knows of a job; None once it has forgotten it. Absence is not success.

    The controller remembers a job for a few minutes after its end (``MinJobAge``), accounting for long, if it is on.
    """
    try:
        return parse_scontrol(client("scontrol", "show", "job", "-o", str(job_id)))
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
    return ask_accounting(job_id)


def ask_accounting(job_id) -> Answer | None:
    """Ask ``sacct`` (also for a job completion file, where a site keeps one); None if there is no accounting."""
    columns = "State,ExitCode,ElapsedRaw"
    for options in (["-X", "-o", columns], ["-c", "-o", "State,ExitCode"]):
        try:
            rows = client("sacct", "-n", "-P", "-j", str(job_id), *options).splitlines()
        except SlurmError:
            continue
        if rows and rows[-1].split("|")[0]:
            state, exit_code, elapsed = (*rows[-1].split("|"), "0")[:3]
            status, _, signal = exit_code.partition(":")
            return make_answer(state, "", status, signal, elapsed)
    return None


def queue_position(job_id) -> int | None:
    """The job's place among the waiting jobs of its partition, 1 for the next; None if it does not wait.

    Only counted: other users' jobs are not shown, and where a site hides them, only one's own are counted.
    """
    mine = client("squeue", "-h", "-t", "PENDING", "-j", str(job_id), "-o", "%i|%P").strip()
    if "|" not in mine:
        return None
    partition = mine.splitlines()[0].split("|")[1]
    order = client("squeue", "-h", "-t", "PENDING", "-p", partition, "-S", "-p,i", "-o", "%i").split()
    return order.index(str(job_id)) + 1 if str(job_id) in order else None
