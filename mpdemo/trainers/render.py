"""``python -m mpdemo render``: write every batch script of the course for a site, and submit nothing.

    python -m mpdemo render --site leonardo               # into slurm/leonardo/
    python -m mpdemo render --site leonardo --out DIR

Each file is checked against the site, and by ``sbatch --test-only`` if the site's own Slurm is in reach.
"""

from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import check, load_site, render, slurm
from mpdemo.jobs.sbatch_text import cpus_per_task, fitted
from mpdemo.jobs.site import find_site
from mpdemo.trainers.course import jobs_of_course


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--site", help="a name in slurm/sites, or a .toml file (default: as for jobs)")
    parser.add_argument("--out", help="folder for the files (default: slurm/SITE)")


def main(args) -> int:
    """Write the files; print each one's name and what is wrong with it. Return 1 if something is, else 0."""
    site, specs = load_site(args.site), jobs_of_course()
    folder = Path(args.out) if args.out else paths.root() / "slurm" / site.name
    cluster = slurm.cluster_name() if slurm.in_reach() else None
    ask_slurm = cluster is not None and (cluster in site.cluster_names or find_site() == "generic")
    wrong = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not args.out:  # a batch script finds the root by this folder
            (paths.root() / paths.SITES).mkdir(parents=True, exist_ok=True)
        for name, spec in specs.items():
            (folder / f"{name}.sbatch").write_text(render(spec, site), encoding="utf-8")
            problems = check(spec, site, ask_slurm)
            print(f"{folder / name}.sbatch", *(f"  {problem}" for problem in problems), sep="\n")
            wrong += bool(problems)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; do: another --out") from None
    judge = f"{site.name} and its Slurm" if ask_slurm else f"{site.name}.toml; no Slurm of that site was asked"
    print(f"{len(specs)} batch scripts, {wrong or 'none'} with a problem; checked against {judge}")
    hours, what = hours_at_most(specs.values(), site)
    print(f"one learner who runs all of them once takes at most {hours:.1f} {what}-hours (every job at its time limit)")
    return 1 if wrong else 0


def hours_at_most(specs, site) -> tuple[float, str]:
    """Return what a site charges for all jobs that reach their time limit, and of which device: GPUs, or cores."""
    jobs, gpus = [fitted(spec, site)[0] for spec in specs], site.gpus_per_node > 0
    cores = [job.tasks_per_node * cpus_per_task(job, site)[0] for job in jobs]
    devices = [job.nodes * (job.gpus_per_node if gpus else count) for job, count in zip(jobs, cores, strict=True)]
    seconds = sum(count * slurm.limit(job.time_limit) for count, job in zip(devices, jobs, strict=True))
    return seconds / 3600, "GPU" if gpus else "core"
