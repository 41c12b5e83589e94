"""Try every job of the course on the cluster before a class, as small as can be.

    mpdemo rehearse --site leonardo
    mpdemo rehearse --only 23_two,31_two_stages
    mpdemo cluster run -- mpdemo rehearse    on a throw-away cluster

Each job has as many nodes and processes as in its notebook, but a training run has two steps. One table says how long
each job waited and ran, and what to fix. The last one, env, has as many processes as the largest: it checks Python,
PyTorch and GPUs, and says where the processes are.
"""

import contextlib
import dataclasses
import io
import itertools
import re
import textwrap
import time
from dataclasses import dataclass

from tabulate import tabulate

from mpdemo.errors import UserError
from mpdemo.jobs import Job, JobSpec, load_site, slurm, submit
from mpdemo.options import count
from mpdemo.tools.cluster.daemons import CLUSTER_NAME
from mpdemo.tools.explain.findings import find
from mpdemo.tools.explain.known import with_cause
from mpdemo.tools.explain.looks import unlabelled
from mpdemo.tools.support.env import NO_GPU
from mpdemo.tools.support.render import jobs_of_course
from mpdemo.world.processes import clean_up_on_signals

HEADERS = ("job", "submitted", "waited", "ran", "what to fix")
SMALL = ["--steps", "2"]  # of a training run
LONGEST = 200  # characters of what to fix, in the table


def add_arguments(parser):
    """Declare the options of the command."""
    parser.add_argument("--site", help="a name in slurm/sites, or a .sbatch file (default: as for jobs)")
    parser.add_argument(
        "--only", help="names of batch scripts, as 23_two,31_two_stages (default: all in slurm/)"
    )
    parser.add_argument(
        "--at-once", type=count(1, 10_000), default=4, help="jobs that may wait or run at a time (4)"
    )
    late = "seconds for all jobs; what has not ended by then is cancelled (3600)"
    parser.add_argument("--wait", type=count(1, 10**7), default=3600, help=late)


def main(args) -> int:
    """Run the jobs and print the table."""
    site = load_site(args.site)
    trials = chosen(args.only)
    if not slurm.in_reach():
        there = "or on a throw-away one: mpdemo cluster run -- mpdemo rehearse"
        raise UserError(f"Slurm not found; rehearse on the cluster, {there}")
    cluster = slurm.cluster_name()
    print(
        f"{len(trials)} jobs of the course for {site.name} on cluster {cluster}; Ctrl-C cancels them",
        flush=True,
    )
    clean_up_on_signals()  # its jobs are cancelled then, too
    run_trials(trials, site, args.at_once, args.wait)
    gpus_exist = site.gpus_per_node > 0 and cluster != CLUSTER_NAME  # PyTorch sees none that are pretended
    for trial in trials:
        trial.to_fix = textwrap.shorten(
            trial.to_fix or what_to_fix(trial, gpus_exist), LONGEST, placeholder="..."
        )
    print("", tabulate([trial.row() for trial in trials], HEADERS, disable_numparse=True), sep="\n")
    failed = [trial for trial in trials if trial.to_fix]
    for trial in failed:
        if trial.job and trial.job.log_files:  # one that never started has none
            print(f"more on {trial.name}: mpdemo explain {trial.spec.out}/{trial.job.log_files[-1].name}")
    for trial in trials:
        if trial.name == "env" and trial.job:
            print(*findings_of_env(trial.job.log()), sep="\n")
    print(f"{len(trials) - len(failed)} of {len(trials)} jobs went well.")
    return 1 if failed else 0


def findings_of_env(log) -> list[str]:
    """Return the lines of the job env without what the launcher and the site print around them."""
    found = itertools.dropwhile(lambda line: not line.startswith(("[OK]", "[FAIL]")), unlabelled(log))
    return [line for line in found if not line.startswith("srun: ")]


@dataclass(eq=False)
class Trial:
    """A job of the course, made small, and what became of it."""

    name: str
    spec: JobSpec
    job: Job | None = None  # None before it is submitted, and if it was refused
    # why it was not submitted, has not ended or failed, and what to do; empty if it went well
    to_fix: str = ""
    submitted: float = 0.0
    waited: str = "-"  # in the queue, as exact as the site is polled

    def start(self, site):
        """Submit the job; a refusal is kept."""
        self.submitted = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the rehearsal has one line for each job
                self.job = submit(self.spec, site, resubmit=True)
        except UserError as error:
            self.to_fix = with_cause(str(error))
        print(f"{self.name}: {f'job {self.job.id}' if self.job else 'refused'}", flush=True)

    def ended(self) -> bool:
        """Whether nothing more will happen; note how long the job has waited."""
        if self.job is None:
            return bool(self.to_fix)  # else it was not submitted yet
        if self.job.finished and self.waited == "-":
            self.waited = f"{max(0.0, time.monotonic() - self.submitted - self.job.run_time):.0f} s"
        return self.job.finished

    def give_up(self, wait):
        """Cancel a job that has not ended in `wait` seconds, and say so; one that is not cancelled is named too."""
        try:
            if self.ended():
                return
            self.to_fix = f"still {state_of(self.job)} after {wait:g} s; do: a larger --wait"
            if self.job is None:
                return
            self.job.cancel()
            line = f"cancelled job {self.job.id} ({self.name})"
        except (UserError, TimeoutError) as error:
            line = f"job {self.job.id} ({self.name}) on {self.job.where} may still run: {error}; do: end it by hand"
        with contextlib.suppress(OSError):  # a lost connection: the others are cancelled too
            print(line, flush=True)

    def row(self) -> tuple:
        """Return the cells of its row."""
        ran = (self.job.id, self.waited, f"{self.job.run_time:.0f} s") if self.job else ("no", "-", "-")
        return self.name, *ran, self.to_fix or "nothing"


def chosen(only) -> list[Trial]:
    """Return the jobs with these names, separated by commas, or all jobs of the course and env."""
    jobs = jobs_of_course()
    largest = max(jobs.values(), key=lambda spec: (spec.nodes, spec.world_size))
    jobs["env"] = dataclasses.replace(largest, name="env", command=("-m", "mpdemo", "env"), out="runs/env")
    names = [name.strip() for name in only.split(",")] if only else list(jobs)
    if unknown := [name for name in names if name not in jobs]:
        raise UserError(f"--only {only}: no job {unknown[0]!r}; allowed: {', '.join(jobs)}")
    return [Trial(name, smallest(name, jobs[name])) for name in names]


def smallest(name, spec) -> JobSpec:
    """Return a job of the course with as many processes as ever, hardly any work and a folder of its own."""
    out = f"runs/rehearsal/{name}"
    command = [word.replace(spec.out, out) for word in spec.command]
    if "mpdemo.labs.lightning_training" in command:
        command[-1] = "2"  # steps
    elif any(word.startswith(("mpdemo.rungs.", "notebooks/scripts/train_")) for word in command):
        command += SMALL
    return dataclasses.replace(spec, out=out, command=tuple(command))


def run_trials(trials, site, at_once, wait):
    """Submit all trials, at most `at_once` at a time, and follow them for at most `wait` seconds.

    Whatever ends it, Ctrl-C too, no job of it is left in Slurm: those that have not ended are cancelled.
    """
    end = time.monotonic() + wait
    waiting, running = list(trials), []
    try:
        while (waiting or running) and time.monotonic() < end:
            if waiting and len(running) < at_once:
                running.append(waiting.pop(0))
                running[-1].start(site)
            running = [trial for trial in running if not trial.ended()]
            time.sleep(0.05)
    finally:
        for trial in trials:
            trial.give_up(wait)


def what_to_fix(trial, gpus_exist) -> str:
    """Return what an ended job's log shows: what the job env found, or the first cause; "" if it went well."""
    log = trial.job.log()
    if trial.job.state == "done":
        blind = gpus_exist and trial.name == "env" and NO_GPU in log
        return "PyTorch sees no GPU; is it built for this site's GPUs?" if blind else ""
    if found := re.findall(r"\[FAIL\] (.*)", log):  # by the job env
        return "; ".join(found)
    for first in find(log):
        return ": ".join(first.explained) if first.known.seen else first.line
    return state_of(trial.job)


def state_of(job) -> str:
    """Return a job's state, with its reason where there is one."""
    if job is None:
        return "not submitted"
    return f"{job.state} ({job.reason})" if job.reason else job.state
