"""The steps of a submission: check, look for an earlier job, write the file, keep the record."""

import dataclasses
import json
import os
import time
from pathlib import Path, PurePosixPath

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import allocation, local_job, slurm, slurm_job
from mpdemo.jobs.check import check
from mpdemo.jobs.job import HERE, Job
from mpdemo.jobs.record import read_record, write_record
from mpdemo.jobs.run_folder import refuse_folder_of_another
from mpdemo.jobs.sbatch_text import render
from mpdemo.world.gpus import gpus_here, gpus_wanted, too_few_gpus
from mpdemo.world.processes import check_room

PLAIN_SITES = ("generic", "throwaway")  # they render the same text: the committed one


def checked_text(spec, site) -> str:
    """Return the job's sbatch file; refuse what the site cannot run."""
    text = render(spec, site)
    problems = check(spec, site, ask_slurm=False)
    if problems:
        raise UserError(f"{spec.name} was not submitted: " + "; ".join(str(problem) for problem in problems))
    return text


def cluster_of_jobs(site) -> str | None:
    """Return the identity of the cluster that queues the jobs; None where they run here, or as steps of our own job."""
    return slurm.identity() if not allocation.surrounding_job(site) and slurm.in_reach() else None


def check_here(spec, site):
    """Refuse what cannot run without a queue, or has no room on this machine or in the job around us."""
    if spec.dependency:
        raise UserError(f"dependency {spec.dependency!r} needs Slurm; here: wait for the other job, then submit")
    if allocation.surrounding_job(site):
        allocation.check_fits(spec, site)
    else:
        check_room(spec.world_size, spec.oversubscribe)


def keep_record(started, script, spec, site) -> dict:
    """Write down, in the run's folder, which job it has; return that record."""
    record = started | {"script": str(script), "spec": dataclasses.asdict(spec), "submitted": time.time()}
    record |= {"polling_seconds": site.polling_seconds}
    write_record(paths.root() / spec.out, record)
    return record


def make_job(record, out, process=None) -> Job:
    if record.get("identity") is None:
        return local_job.LocalJob(record, out, process)
    return slurm_job.SlurmJob(record, out)


def find_earlier(spec, identity, resubmit) -> Job | None:
    """Return the folder's job if it has the same spec and place; refuse a folder whose job still runs."""
    refuse_folder_of_another(spec.out)
    folder = paths.root() / spec.out
    try:
        record = read_record(folder)
    except UserError:
        if not resubmit:
            raise
        return None
    if record is None:
        return None
    job = make_job(record, folder)
    same_place = identity == record.get("identity")
    same = same_place and record["spec"] == json.loads(json.dumps(dataclasses.asdict(spec)))
    if same and not resubmit:
        return job
    if not job.finished:
        busy = f"job {job.id} ({job.name}) on {job.where} is {job.state} and writes to {spec.out}"
        raise UserError(f"{busy}; do: attach({spec.out!r}).cancel(), or give another out=")
    why = "resubmit=True" if same else "another place" if not same_place else "the spec has changed"
    print(f"job {job.id} ({job.state}) was there before; submitting a new one: {why}")
    return None


def write_script(text, spec, site, script) -> Path:
    """Write the sbatch file and return its path relative to the project's root."""
    path = PurePosixPath(script or f"{spec.out}/job.sbatch")
    if path.is_absolute() or ".." in path.parts or path.suffix != ".sbatch":
        raise UserError(f"script = {script!r}; it takes a name below the project's root, as slurm/03_ddp.sbatch")
    if script and site.name not in PLAIN_SITES:
        path = path.parent / site.name / path.name
    file = paths.root() / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")
    return Path(path)


def announce(spec, record) -> str:
    """The one line that reports where the job went."""
    if record["identity"] is None and record["where"] != HERE:
        return f"{spec.name} runs as a step of {record['where']}, which runs this notebook (process {record['id']})"
    if record["where"] == HERE:
        how = f"{spec.world_size} processes under torchrun" if spec.world_size > 1 else "1 process"
        how += f" in place of {spec.nodes} nodes" if spec.nodes > 1 else ""
        if too_few_gpus(spec.devices):
            how += f", on CPU cores: {gpus_wanted(spec.devices)} GPUs wanted, {gpus_here()} here"
        return f"no Slurm in reach: {spec.name} runs on this machine, {how} (job {record['id']})"
    given = ", ".join(f"{name}={os.environ[name]}" for name in slurm.OF_THE_USER if os.environ.get(name))
    given = f", with {given} of the environment" if given else ""
    return f"submitted {spec.name} to {record['where']}: job {record['id']} ({record['script']}){given}"
