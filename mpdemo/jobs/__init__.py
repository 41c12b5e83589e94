"""Jobs: a command or a `JobSpec`, written as a batch script, submitted, followed; by Slurm or on this machine.

    spec = spec_of("torchrun --standalone --nproc-per-node=2 -m mpdemo.rungs.ddp --out runs/ddp")
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
from mpdemo.jobs.spec import JobSpec, spec_of
from mpdemo.jobs.submit import submit

__all__ = ["Job", "JobFailed", "JobSpec", "Site", "SlurmError", "check", "load_site", "render", "spec_of"]
__all__ += ["submit"]
