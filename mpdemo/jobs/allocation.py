"""The job around a notebook, and its own jobs as steps of that one: on what it holds, without the queue.

JupyterLab may itself run in a job, with GPUs of its own. A site file then says ``inside_a_job = "steps"``, or "queue"
for jobs as from a login node. A step is the job's own file, run by bash: its srun starts processes on the nodes that
the surrounding job holds, and Slurm refuses what is more than that.
"""

import dataclasses
import math
import os
import time

from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.jobs.launch_text import torchrun_signals
from mpdemo.jobs.sbatch_text import gpu_rows, render
from mpdemo.world.processes import child_environment

HELD = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")  # what srun needs to find the job; the rest are options


def surrounding_job(site) -> str | None:
    """Return the number of the job whose steps the jobs become; None where they are queued, or there is no such job."""
    return os.environ.get("SLURM_JOB_ID") if site.inside_a_job == "steps" else None


def nodes_held() -> int | None:
    """Return the number of nodes of the surrounding job; None where Slurm did not say it."""
    text = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdigit() else None


def seconds_left() -> float:
    """Return the seconds until the surrounding job's end; infinity where Slurm did not say it."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return max(1.0, int(text) - time.time()) if text.isdigit() else math.inf


def refuse_shared_gpus(spec, site):
    """Refuse a second step on the surrounding job's GPUs: steps that overlap all get the first ones."""
    job, own = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_STEP_ID", "batch")
    steps = slurm.client("squeue", "-h", "-s", "-j", job, "-o", "%i").split() if gpu_rows(spec.on(site), site) else []
    others = [step for step in steps if step.rpartition(".")[2] not in (own, "batch", "extern", "interactive")]
    if others:
        raise UserError(f"step {others[0]} of job {job} may use its GPUs; do: wait for its end, then submit again")


def step_text(spec, site) -> str:
    """Return the job's file with what a step needs: its own shape, as options of srun, and its own port."""
    spec = dataclasses.replace(spec.on(site), requeue=False)  # that would be the surrounding job
    shape = ["--overlap", "--relative=0", f"--nodes={spec.nodes}", f"--ntasks={spec.nodes * spec.tasks_per_node}"]
    shape += [f"--ntasks-per-node={spec.tasks_per_node}", *([f"--hint={site.hint}"] if site.hint else [])]
    shape += [f"--{option}={value}" for option, value, _ in gpu_rows(spec, site)]
    text = render(spec, dataclasses.replace(site, srun_options=(*shape, *site.srun_options)))
    return text.replace("SLURM_JOB_ID % 10000", "(SLURM_JOB_ID + $$) % 10000")


def step_environment(spec, site) -> dict:
    """Return the environment of a job as a step: without the options of the step around us."""
    tasks = {"SLURM_CPUS_PER_TASK": str(spec.on(site).cpus_per_task(site))}
    return child_environment(*HELD) | tasks | torchrun_signals(spec)  # `warn` sends a signal also where none was asked
