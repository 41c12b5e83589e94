"""``python -m mpdemo render``: write every job file of the course for a site, and submit nothing.

    python -m mpdemo render --site leonardo               # into slurm/leonardo/
    python -m mpdemo render --site leonardo --out DIR

Each file is checked against the site, and by ``sbatch --test-only`` where the site's own Slurm is in reach.
"""

from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import slurm, times
from mpdemo.jobs.check import check
from mpdemo.jobs.course import course_jobs
from mpdemo.jobs.sbatch_text import render
from mpdemo.jobs.site import find_site, load_site


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--site", help="a name in slurm/sites, or a .toml file (default: as for jobs)")
    parser.add_argument("--out", help="folder for the files (default: slurm/SITE)")


def main(args) -> int:
    """Write the files; print each one's name and what is wrong with it. Return 1 where something is, else 0."""
    site, specs = load_site(args.site), course_jobs()
    folder = Path(args.out) if args.out else paths.root() / "slurm" / site.name
    ask_slurm = slurm.in_reach() and (slurm.cluster_name() in site.cluster_names or find_site() == "generic")
    if not args.out:
        make_folder(paths.root() / paths.SITES)  # by which a job file finds the root
    problems = {}
    for name, spec in specs.items():
        problems[name] = write(folder / f"{name}.sbatch", spec, site, ask_slurm)
        print(f"{folder / name}.sbatch", *(f"  {problem}" for problem in problems[name]), sep="\n")
    wrong = sum(map(bool, problems.values()))
    judge = f"{site.name} and its Slurm" if ask_slurm else f"{site.name}.toml; no Slurm of that site was asked"
    print(f"{len(problems)} job files, {wrong or 'none'} with a problem; checked against {judge}")
    hours, what = hours_at_most(specs.values(), site)
    print(
        f"one learner who runs each of them once takes at most {hours:.1f} {what}-hours, if all reach their time limit"
    )
    return 1 if wrong else 0


def hours_at_most(specs, site) -> tuple[float, str]:
    """Return what a site charges for all jobs that reach their time limit, and of which device: GPUs, or cores."""
    jobs = [spec.on(site) for spec in specs]
    gpus = site.gpus_per_node > 0
    per_node = [job.gpus_per_node if gpus else job.processes_per_node * job.cpus_on(site) for job in jobs]
    seconds = sum(n * job.nodes * times.limit(job.time_limit) for n, job in zip(per_node, jobs, strict=True))
    return seconds / 3600, "GPU" if gpus else "core"


def make_folder(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}; do: another --out") from None


def write(file, spec, site, ask_slurm) -> list:
    """Write one file; return its problems."""
    make_folder(file.parent)
    try:
        file.write_text(render(spec, site), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; do: another --out") from None
    return check(spec, site, ask_slurm)
