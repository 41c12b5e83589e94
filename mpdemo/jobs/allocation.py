"""The job around a notebook, and its own jobs as steps of that one: on what it holds, without the queue.

JupyterLab may itself run in a job, with GPUs of its own. A site file then says ``inside_a_job = "steps"``, or "queue"
for jobs as from a front end. Both start the same command, from the same text.
"""

import os
import re
from dataclasses import replace

from mpdemo.errors import UserError
from mpdemo.jobs.launch_text import environment, launch
from mpdemo.jobs.sbatch_text import gpu_rows
from mpdemo.world.processes import child_environment

HELD = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")  # what srun needs to find the job; the rest are options


def surrounding_job(site) -> str | None:
    """Return the number of the job whose steps the jobs become; None where they are queued, or there is no such job."""
    return os.environ.get("SLURM_JOB_ID") if site.inside_a_job == "steps" else None


def check_fits(spec, site):
    """Refuse more than the surrounding job holds, before anything is started.

    Raises
    ------
    UserError
        With both numbers.
    """
    spec = spec.on(site)
    cpus = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # as "40(x2),20"
    holds = {
        "nodes": (spec.nodes, os.environ.get("SLURM_JOB_NUM_NODES")),
        "CPUs per node": (spec.processes_per_node * spec.cpus_on(site), min(map(int, cpus), default=None)),
        "GPUs per node": (spec.gpus_per_node if gpu_rows(spec, site) else 0, os.environ.get("SLURM_GPUS_ON_NODE")),
    }
    for what, (wanted, available) in holds.items():
        if available is not None and wanted > int(available):
            raise UserError(
                f"{spec.name} needs {wanted} {what}; job {os.environ['SLURM_JOB_ID']}, which runs this notebook, has "
                f'{available}; do: a smaller job, or inside_a_job = "queue" in {site.name}.toml'
            )


def step_command(spec, site) -> list[str]:
    """Return the command of a job as a step: a shell that prepares it as the job's file would, and becomes srun."""
    spec = spec.on(site)
    tasks = spec.processes_per_node if spec.launcher == "srun" else 1
    cpus = spec.cpus_on(site) * spec.processes_per_node // tasks
    gpus = [f"--{option}={value}" for option, value, _ in gpu_rows(spec, site)]
    shape = [
        "--overlap",
        "--relative=0",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.nodes * tasks}",
        f"--ntasks-per-node={tasks}",
    ]
    comment, first_line, *rest = launch(spec, replace(site, srun_options=(*shape, *gpus, *site.srun_options)))
    lines = [
        f"export SLURM_CPUS_PER_TASK={cpus}",
        *environment(spec, site),
        "MASTER_PORT=$((20000 + ($SLURM_JOB_ID + $$) % 10000))  # a job may have several steps: one port for each",
        comment,
        f"exec {first_line}",
        *rest,
    ]
    return ["bash", *["-l"] * site.login_shell, "-c", "\n".join(lines)]


def step_environment() -> dict:
    """Return the environment of a step: the surrounding job's own, without the options of the step around us."""
    return child_environment(*HELD)
