"""The jobs of the course; write their batch scripts for a site, and check them; nothing is submitted.

mpdemo render --site leonardo               into slurm/leonardo/
mpdemo render --site leonardo --ood FOLDER  an app for Open OnDemand instead
"""

import tomllib
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import load_site, slurm, spec_of
from mpdemo.jobs.check import check
from mpdemo.jobs.sbatch_text import cpus_per_task, fitted, gpus_on_node, render
from mpdemo.jobs.site import chosen, find_site, read_site
from mpdemo.tools.support import ood


def add_arguments(parser):
    """Declare the options of the command."""
    parser.add_argument("--site", help="a name in slurm/sites, or a .sbatch file (default: as for jobs)")
    parser.add_argument("--out", help="folder for the files (default: slurm/SITE)")
    parser.add_argument("--ood", metavar="FOLDER", help="write an app for Open OnDemand there instead")


def main(args) -> int:
    """Write the batch scripts; print the name of each and what is wrong with it, and what a learner uses at most.

    Each is checked against the site, and by ``sbatch --test-only`` if the site's own Slurm is found.
    """
    if args.ood:
        files = ood.write(read_site(chosen(args.site)), args.ood)
        print(*files, "not tried on a portal: see slurm/README.md", sep="\n")
        return 0
    site = load_site(args.site)
    jobs = jobs_of_course()
    folder = Path(args.out) if args.out else paths.root() / "slurm" / site.name
    cluster = slurm.cluster_name() if slurm.in_reach() else None
    ask_slurm = cluster is not None and (cluster in site.cluster_names or find_site() == "generic")
    wrong = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not args.out:  # a batch script finds the root by this folder
            (paths.root() / paths.SITES).mkdir(parents=True, exist_ok=True)
        for name, job in jobs.items():
            (folder / f"{name}.sbatch").write_text(render(job, site), encoding="utf-8")
            problems = check(job, site, ask_slurm)
            print(f"{folder / name}.sbatch", *(f"  {problem}" for problem in problems), sep="\n")
            wrong += bool(problems)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; do: another --out") from None
    judge = (
        f"{site.name} and its Slurm"
        if ask_slurm
        else f"{site.name}.sbatch; no Slurm of that site was asked"
    )
    print(f"{len(jobs)} batch scripts, {wrong or 'none'} with a problem; checked against {judge}")
    hours, what = hours_at_most(jobs.values(), site)
    print(
        f"one learner who runs all of them once takes at most {hours:.1f} {what}-hours (every job at its time limit)"
    )
    return 1 if wrong else 0


def jobs_of_course() -> dict:
    """Return the jobs that the course submits, listed in ``slurm/course.toml``, by name: ``23_two`` -> `JobSpec`.

    The list is that of the folder one works in, if it has one, else the one that came with mpdemo.
    That a notebook submits each is in test_notebooks.py.
    """
    file = paths.slurm_files("course.toml")["course"]
    name = ""
    try:
        jobs = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, words in jobs.items():
            jobs[name] = spec_of(**words)
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        raise UserError(f"{file} {name}: {error}; do: write it as its other jobs are") from None
    return jobs


def hours_at_most(jobs, site) -> tuple[float, str]:
    """Return what a site charges for all jobs that reach their time limit, and of which device: GPUs, or cores."""
    seconds, has_gpus = 0, site.gpus_per_node > 0
    for job in (fitted(job, site) for job in jobs):
        cores = job.tasks_per_node * cpus_per_task(job, site)
        seconds += (
            job.nodes * (gpus_on_node(job, site) if has_gpus else cores) * slurm.limit(job.time_limit)
        )
    return seconds / 3600, "GPU" if has_gpus else "core"
