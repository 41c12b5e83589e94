"""``python -m mpdemo rehearse``: the day before, run every job of the course on the cluster, as small as can be.

    python -m mpdemo rehearse --site jeanzay
    python -m mpdemo rehearse --only 03_two_nodes,06_hybrid
    python -m mpdemo cluster run --site jeanzay -- python -m mpdemo rehearse    on a throw-away cluster of its shape

A job is what a notebook submits, with as many nodes and processes; a training has two steps. One table says of each how
long it waited and ran, what its Python is, and what to mend. Exit status 1 where one failed.
"""

from pydantic import Field
from pydantic.dataclasses import dataclass
from tabulate import tabulate

from mpdemo.errors import UserError, one_line_errors
from mpdemo.jobs import load_site, slurm
from mpdemo.jobs.course import course_jobs
from mpdemo.options import add_options, option_name, options_from
from mpdemo.rehearse.run import run_trials
from mpdemo.rehearse.trial import Trial, smallest
from mpdemo.world.processes import clean_up_on_signals

HEADERS = ("job", "submitted", "waited", "ran", "Python", "torch", "GPUs", "nccl", "what to mend")
PRETENDED = "throwaway"  # the name of the clusters whose GPUs are pretended


@one_line_errors(option_name)
@dataclass(frozen=True, config={"extra": "forbid"})
class Request:
    """What to rehearse: the options of ``python -m mpdemo rehearse``."""

    site: str | None = Field(None, description="a name in slurm/sites, or a .toml file (default: as for jobs)")
    only: str | None = Field(None, description="names of job files, as 03_ddp,06_hybrid (default: all in slurm/)")
    at_once: int = Field(4, ge=1, description="jobs that may wait or run at the same time")
    wait: float = Field(3600.0, gt=0, description="seconds for all jobs; what has not ended by then is cancelled")


def add_arguments(parser):
    """Declare the arguments of ``mpdemo rehearse``."""
    add_options(parser, Request)


def main(args) -> int:
    """Run the jobs and print the table; return 0 where all went well, else 1."""
    request = options_from(args, Request)
    site, trials = load_site(request.site), [Trial(name, smallest(name, job)) for name, job in chosen(request.only)]
    if not slurm.in_reach():
        there = "or on a throw-away one: python -m mpdemo cluster run -- python -m mpdemo rehearse"
        raise UserError(f"no Slurm in reach; rehearse on the cluster, {there}")
    cluster = slurm.configuration().get("ClusterName")
    print(f"{len(trials)} jobs of the course for {site.name} on cluster {cluster}; Ctrl-C cancels them", flush=True)
    clean_up_on_signals()  # its jobs are cancelled then, too
    run_trials(trials, site, request.at_once, request.wait)
    gpus_exist = site.gpus_per_node > 0 and cluster != PRETENDED
    advice = {trial: trial.advice(gpus_exist) for trial in trials}
    print("", table(advice), sep="\n")
    failed = [trial for trial, line in advice.items() if line]
    for trial in (trial for trial in failed if trial.job and trial.job.log_files):  # one that never started has none
        print(f"more on {trial.name}: python -m mpdemo explain {trial.spec.out}/{trial.job.log_files[-1].name}")
    print(f"{len(trials) - len(failed)} of {len(trials)} jobs went well.")
    return 1 if failed else 0


def chosen(only) -> list:
    """Return the jobs of the course that are to be rehearsed: (name of the file, spec)."""
    jobs = course_jobs()
    names = [name.strip() for name in only.split(",")] if only else list(jobs)
    if unknown := [name for name in names if name not in jobs]:
        raise UserError(f"--only {only}: no job {unknown[0]!r}; allowed: {', '.join(jobs)}")
    return [(name, jobs[name]) for name in names]


def table(advice) -> str:
    """Return one row for each trial."""
    rows = []
    for trial, mend in advice.items():
        facts = trial.facts()
        waited = "-" if trial.waited is None else f"{trial.waited:.0f} s"
        ran = f"{trial.job.run_time:.0f} s" if trial.job else "-"
        seen = [facts.get(name, "-") for name in ("python", "torch", "gpus", "nccl")]
        rows.append([trial.name, trial.job.id if trial.job else "no", waited, ran, *seen, mend or "nothing"])
    return tabulate(rows, HEADERS, "simple", disable_numparse=True)
