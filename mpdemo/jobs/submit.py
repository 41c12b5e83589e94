"""Submit a job, once: to Slurm where one is in reach, else to this machine."""

from contextlib import ExitStack

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import array, local_job, slurm_job
from mpdemo.jobs.job import Job
from mpdemo.jobs.record import read_record
from mpdemo.jobs.run_folder import prepared
from mpdemo.jobs.sbatch_text import log_options, render
from mpdemo.jobs.site import Site, load_site
from mpdemo.jobs.submission import (
    announce,
    check_here,
    checked_text,
    cluster_of_jobs,
    find_earlier,
    keep_record,
    make_job,
    write_script,
)


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
    if debug:
        print(render(spec, site), end="")
        return None
    if spec.array:
        raise UserError(f"{spec.name} is an array ({spec.array}); do: jobs = submit_array(spec)")
    text, identity = checked_text(spec, site), cluster_of_jobs(site)
    earlier = find_earlier(spec, identity, resubmit)
    if earlier:
        known = f"found job {earlier.id} ({earlier.state}) in {spec.out}"
        print(f"{known}: not submitted again; resubmit=True runs it again")
        return earlier
    if identity is None:
        check_here(spec, site)
    with prepared(spec) as out:
        path = write_script(text, spec, site, script)
        if identity:
            started, process = slurm_job.start(path, identity, log_options(spec, site)), None
        else:
            started, process = local_job.start(spec, site)
    print(announce(spec, started | {"script": path}))  # first: a full disk takes no record
    return make_job(keep_record(started, path, spec, site), out, process)


def submit_array(spec, site=None, script=None, resubmit=False) -> list[Job]:
    """Submit a job array: one sbatch, and a job of its own for each element, in a folder of its own.

    In the spec's command ``{index}`` stands for the element's number, and the element's folder is ``OUT/NUMBER``. Only
    the elements that their folders do not know yet are submitted.

    Parameters
    ----------
    spec : JobSpec
        With `array`, as ``"1-8%2"``: eight elements, two at a time.
    site, script, resubmit
        As for `submit`.

    Returns
    -------
    list of Job
        By rising number; each can be followed, cancelled and found again by itself.

    Raises
    ------
    UserError
        As `submit`; or there is no queue to submit to.
    """
    site = site if isinstance(site, Site) else load_site(site)
    if not spec.array:
        raise UserError(f'{spec.name} is no array; do: JobSpec(..., array="1-8%2"), or submit(spec)')
    text, identity = checked_text(spec, site), cluster_of_jobs(site)
    if identity is None:
        raise UserError(
            "an array needs Slurm's queue; here: submit one element after the other: submit(spec.element(1))"
        )
    elements = {index: spec.element(index) for index in array.indices(spec.array)}
    jobs = {index: find_earlier(element, identity, resubmit) for index, element in elements.items()}
    missing = [index for index, job in jobs.items() if job is None]
    if len(missing) < len(jobs):
        print(f"found {len(jobs) - len(missing)} of {len(jobs)} elements in {spec.out}: not submitted again; "
              "resubmit=True runs them again")  # fmt: skip
    if missing:
        with ExitStack() as stack:
            folders = {index: stack.enter_context(prepared(elements[index])) for index in missing}
            path = write_script(text, spec, site, script)
            options = [*log_options(spec, site), f"--array={array.chosen(spec.array, missing)}"]
            started = slurm_job.start(path, identity, options)
        print(announce(spec, started | {"script": path}))
        for index, out in folders.items():
            record = keep_record(started | {"id": f"{started['id']}_{index}"}, path, elements[index], site)
            jobs[index] = make_job(record, out)
    return list(jobs.values())


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
    return make_job(record, folder)
