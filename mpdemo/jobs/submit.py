"""Submit a job, once: to Slurm where it is found, else to this machine."""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from mpdemo import paths
from mpdemo.errors import UserError, wrapped
from mpdemo.jobs import local_job, slurm, slurm_job
from mpdemo.jobs.check import check
from mpdemo.jobs.job import RECORD, Job, read_record, write_record
from mpdemo.jobs.programs import changed, programs
from mpdemo.jobs.sbatch_text import render
from mpdemo.jobs.site import Site, load_site
from mpdemo.jobs.spec import JobSpec
from mpdemo.world.devices import gpus_here, gpus_wanted, too_few_gpus
from mpdemo.world.processes import check_room

AnySite = Site | str | None
RESULTS = ("exit-status.txt", "exit-status.json", "summary.json")


def submit(spec: JobSpec, site: AnySite = None, resubmit: bool = False, announce: bool = True) -> Job:
    """Write a job's batch script and submit it; where no Slurm is found, run the same command on this machine.

    Running the cell again does not submit again: the run's folder knows its job.

    Parameters
    ----------
    spec : JobSpec
    site : Site or str, optional
        Default: `mpdemo.jobs.load_site`'s choice.
    resubmit : bool
        Submit although the run's folder already has such a job.
    announce : bool
        Whether to print where the job went. That is printed in any case if it has several nodes, or GPUs are missing.

    Raises
    ------
    UserError
        The job cannot run on this site (see `check`), Slurm refused it (with its message), or the folder is busy.
    """
    site = site if isinstance(site, Site) else load_site(site)
    if problems := check(spec, site, ask_slurm=False):
        raise UserError(f"{spec.name} was not submitted: " + "; ".join(map(str, problems)))
    identity = slurm.identity() if slurm.in_reach() else None
    with alone(spec) as out:
        if earlier := find_earlier(spec, identity, resubmit):
            return earlier
        return start(spec, site, identity, out, announce)


def start(spec: JobSpec, site: Site, identity: Any, out: Path, announce: bool = True) -> Job:
    """Start a job with the folder `out` on the cluster of this identity; without one, on this machine."""
    if identity is None:
        check_room(spec.world_size, spec.oversubscribe)
    read = programs(spec.command)  # before they start: what is edited from now on may not be in it
    with results_aside(spec, out):
        path = Path(spec.out, "job.sbatch")
        (paths.root() / path).write_text(render(spec, site), encoding="utf-8")
        started = (
            slurm_job.start(spec, path, identity, site.gives("error"))
            if identity
            else local_job.start(spec)
        )
    record = {**started, "script": str(path), "spec": dataclasses.asdict(spec), "submitted": time.time()}
    record["programs"] = read
    record["polling_seconds"] = site.polling_seconds
    if announce or spec.nodes > 1 or (identity is None and too_few_gpus(spec.devices)):
        print(wrapped(announcement(spec, record)))  # first: a full disk takes no record
    write_record(out, record)
    return Job(record, out)


def find_earlier(spec: JobSpec, identity: Any, resubmit: bool) -> Job | None:
    """Return the folder's job if it has the same spec, place and programs; refuse a folder whose job still runs."""
    folder = paths.root() / spec.out
    if (folder / RECORD).exists() and (owner := (folder / RECORD).stat().st_uid) != os.getuid():
        yours = "work in a folder of your own: export MPDEMO_ROOT=..., or give another out"
        raise UserError(f"{spec.out} holds the job of another user (number {owner}); {yours}")
    if (record := read_record(folder)) is None:
        return None
    job = Job(record, folder)
    same_place = identity == record.get("identity")
    same = same_place and record["spec"] == json.loads(json.dumps(dataclasses.asdict(spec)))
    stale = changed(record.get("programs"), spec.command) if same and not resubmit else ""
    if job.state == "cancelled":  # what a kernel has started on this machine ends with it
        stale = "it was cancelled" + ("" if identity else ", or its kernel has ended")
    if same and not resubmit and not (stale and job.finished):
        known = f"found job {job.id} ({job.state}) in {spec.out}: not submitted again"
        known += (
            f", although {stale}; do: cancel it, and run this again"
            if stale
            else "; resubmit=True runs it again"
        )
        print(wrapped(known))
        return job
    if not job.finished:
        busy = f"{job.title} is {job.state} and writes to {spec.out}"
        raise UserError(f"{busy}; do: cancel it, or give another name or out")
    if job.state == "unknown" and not job.own_cluster and not resubmit:
        what = f"{job.title} may still write to {spec.out}: {job.reason}"
        raise UserError(f"{what}; do: give another out=, or resubmit=True if it has ended")
    why = (
        "of resubmit=True"
        if same
        else "the command or an option has changed"
        if same_place
        else "it ran elsewhere"
    )
    print(
        wrapped(
            f"found job {job.id} ({job.state}); submitting a new one, because {(same and stale) or why}"
        )
    )
    return None


def announcement(spec: JobSpec, record: dict[str, Any]) -> str:
    """Return the one line that reports where the job went."""
    if record["identity"]:
        given = ", ".join(
            f"{name}={os.environ[name]}" for name in slurm.OF_THE_USER if os.environ.get(name)
        )
        given = f", with {given} of the environment" if given else ""
        return f"submitted {spec.name} to {record['where']}: job {record['id']} ({record['script']}){given}"
    how = f"{spec.world_size} processes" if spec.world_size > 1 else "1 process"
    how += f" in place of {spec.nodes} nodes" if spec.nodes > 1 else ""
    if too_few_gpus(spec.devices):
        how += f", on CPU cores: {gpus_wanted(spec.devices)} GPUs wanted, {gpus_here()} here"
    return f"{slurm.none_in_reach()}: {spec.name} runs on this machine, {how} (job {record['id']})"


@contextlib.contextmanager
def alone(spec: JobSpec) -> Generator[Path]:
    """Yield a run's folder, and let no other Python submit to it: it would not find this job yet, and start another."""
    out = make_folder(spec)
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(
            f"another Python is submitting a job to {spec.out}; do: wait, or give another out="
        ) from None
    except OSError:
        pass  # this file system has no locks
    try:
        yield out
    finally:
        os.close(folder)


@contextlib.contextmanager
def results_aside(spec: JobSpec, out: Path) -> Generator[None]:
    """Move the last run's results aside: they would be taken for those of the new job.

    A run that resumes keeps metrics and checkpoints. Where the submission is refused, all go back to their places.
    """
    moved = {out / name: out / name.replace(".", ".previous.") for name in RESULTS}
    kept = next(path for n in itertools.count(1) if not (path := out / f"checkpoints.{n}").exists())
    if not any(argument.startswith("--resume") for argument in spec.command):
        moved[out / "metrics.jsonl"] = out / "metrics.previous.jsonl"
        moved[out / "checkpoints"] = kept
    moved = {path: aside for path, aside in moved.items() if path.exists()}
    for path, aside in moved.items():
        path.replace(aside)
    try:
        yield
    except BaseException:
        for path, aside in moved.items():
            aside.replace(path)
        raise
    if out / "checkpoints" in moved:
        print(wrapped(f"the earlier run's checkpoints are kept in {spec.out}/{kept.name}"))


def make_folder(spec: JobSpec) -> Path:
    """Make the folder of a run, in which Slurm writes the log, and the one by which a batch script finds the root."""
    elsewhere, runs = os.environ.get("MPDEMO_RUNS"), paths.root() / "runs"
    try:
        if elsewhere:  # on a large disk, by a link: the commands and batch scripts stay the same
            Path(elsewhere).mkdir(parents=True, exist_ok=True)
            if not runs.is_symlink() and not runs.exists():
                runs.symlink_to(Path(elsewhere).absolute())
            if runs.resolve() != Path(elsewhere).resolve():
                raise UserError(
                    f"MPDEMO_RUNS is {elsewhere}, but {runs} is there already; do: mv {runs} {runs}.before"
                )
        for folder in (paths.root() / spec.out, paths.root() / paths.SITES):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run's folder {spec.out}: {error.strerror}") from None
    if not os.access(paths.root() / spec.out, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write into {spec.out}; work in a folder of your own: export MPDEMO_ROOT=..."
        )
    return paths.root() / spec.out
