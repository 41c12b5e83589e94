"""The job around a notebook, and its own jobs as steps of that one: on what it holds, without the queue.

JupyterLab may itself run in a job, with GPUs of its own. A site file then says ``inside_a_job = "steps"``, or "queue"
for jobs as from a front end. Both start the same command, from the same text.
"""

import math
import os
import re
import shlex
import time
from dataclasses import replace
from typing import NamedTuple

from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.launch_text import environment, launch, torchrun_signals
from mpdemo.jobs.sbatch_text import gpu_rows
from mpdemo.world.processes import child_environment

PREFIX = "mpdemo-"  # of the steps' names
HELD = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")  # what srun needs to find the job; the rest are options


class Start(NamedTuple):
    """How the supervisor starts a job that is not in the queue."""

    command: list[str]
    environment: dict
    limit: float  # s, until whatever is around it ends
    launcher: str  # "srun", "torchrun", or "" for a single process
    where: str  # for the job's record


def surrounding_job(site) -> str | None:
    """Return the number of the job whose steps the jobs become; None where they are queued, or there is no such job."""
    return os.environ.get("SLURM_JOB_ID") if site.inside_a_job == "steps" else None


def check_fits(spec, site):
    """Refuse more than the surrounding job holds, and a second step on its GPUs, before anything is started.

    Raises
    ------
    UserError
        With both numbers.
    """
    spec, job = spec.on(site), os.environ["SLURM_JOB_ID"]
    gpus = spec.gpus_per_node if gpu_rows(spec, site) else 0
    for what, (wanted, available) in {
        "nodes": (spec.nodes, nodes_held()),
        "CPUs per node": (spec.processes_per_node * spec.cpus_on(site), cpus_held()),
        "GPUs per node": (gpus, gpus_held()),
    }.items():
        if available is not None and wanted > available:
            raise UserError(
                f"{spec.name} needs {wanted} {what}; job {job}, which runs this notebook, has {available}; "
                f'do: a smaller job, or inside_a_job = "queue" in {site.name}.toml'
            )
    names = slurm.client("squeue", "-h", "-s", "-j", job, "-o", "%j").splitlines() if gpus else []
    others = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    if others:  # steps that overlap all get the job's first GPUs
        raise UserError(
            f"the step {others[0]} of job {job} uses its GPUs; do: wait for its end, then submit {spec.name}"
        )


def nodes_held() -> int | None:
    """Return the number of nodes of the surrounding job; None where Slurm did not say it."""
    text = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdigit() else None


def cpus_held() -> int | None:
    """Return the CPUs that the surrounding job has on the node with the fewest; None where Slurm did not say it."""
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # as "40(x2),20"
    return min(map(int, counts), default=None)


def gpus_held() -> int:
    """Return the GPUs that the surrounding job has on this node."""
    text = os.environ.get("SLURM_GPUS_ON_NODE", "")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return int(text) if text.isdigit() else len(visible)


def seconds_left() -> float:
    """Return the seconds until the surrounding job's end; infinity where Slurm did not say it."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return max(1.0, int(text) - time.time()) if text.isdigit() else math.inf


def step_command(spec, site) -> list[str]:
    """Return the command of a job as a step: a shell that prepares it as the job's file would, and becomes srun."""
    spec = spec.on(site)
    gpus = [f"--{option}={value}" for option, value, _ in gpu_rows(spec, site)]
    shape = [
        f"--job-name={shlex.quote(PREFIX + spec.name)}",
        "--overlap",
        "--relative=0",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.nodes * spec.tasks_per_node}",
        f"--ntasks-per-node={spec.tasks_per_node}",
        *([f"--hint={site.hint}"] if site.hint else []),
    ]
    comment, first_line, *rest = launch(spec, replace(site, srun_options=(*shape, *gpus, *site.srun_options)))
    lines = [
        f"export SLURM_CPUS_PER_TASK={spec.cpus_per_task(site)}",
        torchrun_signals(spec),  # also without a signal in the job: `warn` sends one
        *environment(replace(spec, signal=None), site),
        "MASTER_PORT=$((20000 + ($SLURM_JOB_ID + $$) % 10000))  # a job may have several steps: one port for each",
        comment,
        f"exec {first_line}",
        *rest,
    ]
    return ["bash", *["-l"] * site.login_shell, "-c", "\n".join(lines)]


def as_step(spec, site, job) -> Start:
    """Return how a job starts as a step of `job`: without the options of the step around us."""
    return Start(step_command(spec, site), child_environment(*HELD), seconds_left(), "srun", f"job {job}")
