"""Submit a job, once: to Slurm where one is in reach, else to this machine."""

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
from mpdemo.jobs.record import prepared, read_record, refuse_folder_of_another, write_record
from mpdemo.jobs.sbatch_text import log_options, render
from mpdemo.jobs.site import Site, load_site
from mpdemo.world.devices import gpus_here, gpus_wanted, too_few_gpus
from mpdemo.world.processes import check_room

PLAIN_SITES = ("generic", "throwaway")  # they render the same text: the committed one


def submit(spec, site=None, script=None, resubmit=False, debug=False) -> Job | None:
    """Write a job's sbatch file and submit it; without a Slurm in reach, run the same command on this machine.

    Running the cell again does not submit again: the run's folder knows its job.

    Parameters
    ----------
    spec : JobSpec
    site : Site or str, optional
        Default: `mpdemo.jobs.load_site`'s choice.
    script : str, optional
        Where to write the sbatch file, as ``"slurm/03_ddp.sbatch"``; by default in the run's folder. For a site other
        than the plain ones it goes to a folder with the site's name, so that the committed files stay as they are.
    resubmit : bool
        Submit although the run's folder already has such a job.
    debug : bool
        Print the file and submit nothing.

    Returns
    -------
    Job or None
        None with `debug`.

    Raises
    ------
    UserError
        The job cannot run on this site (see `check`), Slurm refused it (with its message), or the folder is busy.
    """
    site = site if isinstance(site, Site) else load_site(site)
    text = render(spec, site)
    if debug:
        print(text, end="")
        return None
    if problems := check(spec, site, ask_slurm=False):
        raise UserError(f"{spec.name} was not submitted: " + "; ".join(map(str, problems)))
    identity = cluster_of_jobs(site)
    if earlier := find_earlier(spec, identity, resubmit):
        known = f"found job {earlier.id} ({earlier.state}) in {spec.out}"
        print(f"{known}: not submitted again; resubmit=True runs it again")
        return earlier
    if identity is None:
        check_here(spec, site)
    with prepared(spec) as out:
        path = write_script(text, spec, site, script)
        if identity:
            started = slurm_job.start(path, identity, log_options(spec, site))
        else:
            started = local_job.start(spec, site)
            around = allocation.surrounding_job(site)
            started["where"] = f"job {around}" if around else HERE
    record = started | {"script": str(path), "spec": dataclasses.asdict(spec), "submitted": time.time()}
    record |= {"polling_seconds": site.polling_seconds}
    print(announcement(spec, record))  # first: a full disk takes no record
    write_record(out, record)
    return Job(record, out)


def attach(out) -> Job:
    """Return the job of a run's folder, as after a restart of the kernel.

    Parameters
    ----------
    out : str
        The run's folder, relative to the project's root.

    Raises
    ------
    UserError
        No job was submitted from there.
    """
    folder = paths.root() / out
    record = read_record(folder)
    if record is None:
        raise UserError(f"no job in {out}; submit one with out={str(out)!r}")
    return Job(record, folder)


def cluster_of_jobs(site) -> str | None:
    """Return the identity of the cluster that queues the jobs; None where they run here, or as steps of our own job."""
    return slurm.identity() if not allocation.surrounding_job(site) and slurm.in_reach() else None


def check_here(spec, site):
    """Refuse what cannot run without a queue, or has no room on this machine or in the job around us."""
    if spec.dependency:
        raise UserError(f"dependency {spec.dependency!r} needs Slurm; here: wait for the other job, then submit")
    if allocation.surrounding_job(site):
        allocation.refuse_shared_gpus(spec, site)
    else:
        check_room(spec.world_size, spec.oversubscribe)


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
    job = Job(record, folder)
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


def announcement(spec, record) -> str:
    """Return the one line that reports where the job went."""
    if record["identity"]:
        given = ", ".join(f"{name}={os.environ[name]}" for name in slurm.OF_THE_USER if os.environ.get(name))
        given = f", with {given} of the environment" if given else ""
        return f"submitted {spec.name} to {record['where']}: job {record['id']} ({record['script']}){given}"
    if record["where"] != HERE:
        return f"{spec.name} runs as a step of {record['where']}, which runs this notebook (process {record['id']})"
    how = f"{spec.world_size} processes" if spec.world_size > 1 else "1 process"
    how += f" in place of {spec.nodes} nodes" if spec.nodes > 1 else ""
    if too_few_gpus(spec.devices):
        how += f", on CPU cores: {gpus_wanted(spec.devices)} GPUs wanted, {gpus_here()} here"
    return f"no Slurm in reach: {spec.name} runs on this machine, {how} (job {record['id']})"
