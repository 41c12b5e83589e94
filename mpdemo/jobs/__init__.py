"""Jobs: described once in a `JobSpec`, written as a batch script, submitted, followed; by Slurm or on this machine.

    spec = JobSpec(name="ddp", command=train_command(rung="ddp", out="runs/ddp"), out="runs/ddp", processes_per_node=2)
    print(render(spec, load_site()))
    job = submit(spec)
    job.wait(timeout=300)

Imports neither PyTorch nor matplotlib, so it runs on a login node with little memory.
"""

from mpdemo.jobs.check import check
from mpdemo.jobs.job import Job, JobFailed
from mpdemo.jobs.sbatch_text import render
from mpdemo.jobs.site import Site, load_site
from mpdemo.jobs.slurm import SlurmError
from mpdemo.jobs.spec import JobSpec, train_command
from mpdemo.jobs.submit import attach, submit

__all__ = ["Job", "JobFailed", "JobSpec", "Site", "SlurmError", "attach", "check", "load_site", "render", "submit",
           "train_command"]  # fmt: skip
