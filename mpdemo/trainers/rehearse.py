"""``python -m mpdemo rehearse``: the day before, run every job of the course on the cluster, as small as can be.

    python -m mpdemo rehearse --site jeanzay
    python -m mpdemo rehearse --only 03_two_nodes,06_hybrid
    python -m mpdemo cluster run -- python -m mpdemo rehearse    on a throw-away cluster

A job is what a notebook submits, with as many nodes and processes; a training run has two steps. One table says of each
how long it waited and ran, and what to fix. The last job, env, has as many processes as the largest: it checks Python,
PyTorch and GPUs, and where the processes are and how fast they talk, one row per rank. Exit status 1 if one failed.
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

from mpdemo.cluster.daemons import CLUSTER_NAME
from mpdemo.doctor import NO_GPU
from mpdemo.errors import UserError
from mpdemo.jobs import Job, JobSpec, load_site, slurm, submit
from mpdemo.jobs.explain import find
from mpdemo.jobs.reading import unlabelled
from mpdemo.options import count
from mpdemo.trainers.course import jobs_of_course
from mpdemo.world.processes import clean_up_on_signals

HEADERS = ("job", "submitted", "waited", "ran", "what to fix")
SMALL = ["--steps", "2", "--warmup-steps", "0"]  # of a training run
LABS = {"lightning_training": ["2"]}  # what follows the folder in a lab's command when it is small: a number of steps
LONGEST = 200  # characters of a line of advice


def add_arguments(parser):
    """Declare the options."""
    parser.add_argument("--site", help="a name in slurm/sites, or a .toml file (default: as for jobs)")
    parser.add_argument("--only", help="names of batch scripts, as 03_ddp,06_hybrid (default: all in slurm/)")
    parser.add_argument("--at-once", type=count(1, 10_000), default=4, help="jobs that may wait or run at a time (4)")
    late = "seconds for all jobs; what has not ended by then is cancelled (3600)"
    parser.add_argument("--wait", type=count(1, 10**7), default=3600, help=late)


def main(args) -> int:
    """Run the jobs and print the table; return 0 if all went well, else 1."""
    site, jobs = load_site(args.site), jobs_of_course()
    largest = max(jobs.values(), key=lambda spec: (spec.nodes, spec.world_size))
    jobs["env"] = dataclasses.replace(largest, name="env", command=("-m", "mpdemo", "env"), out="runs/env")
    names = [name.strip() for name in args.only.split(",")] if args.only else list(jobs)
    if unknown := [name for name in names if name not in jobs]:
        raise UserError(f"--only {args.only}: no job {unknown[0]!r}; allowed: {', '.join(jobs)}")
    if not slurm.in_reach():
        there = "or on a throw-away one: python -m mpdemo cluster run -- python -m mpdemo rehearse"
        raise UserError(f"no Slurm in reach; rehearse on the cluster, {there}")
    trials, cluster = [Trial(name, smallest(name, jobs[name])) for name in names], slurm.cluster_name()
    print(f"{len(trials)} jobs of the course for {site.name} on cluster {cluster}; Ctrl-C cancels them", flush=True)
    clean_up_on_signals()  # its jobs are cancelled then, too
    run_trials(trials, site, args.at_once, args.wait)
    gpus_exist = site.gpus_per_node > 0 and cluster != CLUSTER_NAME
    rows, failed = [], []
    for trial in trials:
        advice = textwrap.shorten(trial.advice(gpus_exist), LONGEST, placeholder="...")
        failed += [trial] * bool(advice)
        ran = (trial.job.id, trial.waited, f"{trial.job.run_time:.0f} s") if trial.job else ("no", "-", "-")
        rows.append([trial.name, *ran, advice or "nothing"])
    print("", tabulate(rows, HEADERS, disable_numparse=True), sep="\n")
    for trial in (trial for trial in failed if trial.job and trial.job.log_files):  # one that never started has none
        print(f"more on {trial.name}: python -m mpdemo explain {trial.spec.out}/{trial.job.log_files[-1].name}")
    for trial in (trial for trial in trials if trial.name == "env" and trial.job):
        found = itertools.dropwhile(lambda line: not line.startswith(("[OK]", "[FAIL]")), trial.lines())
        print(*(line for line in found if not line.startswith("srun: ")), sep="\n")
    print(f"{len(trials) - len(failed)} of {len(trials)} jobs went well.")
    return 1 if failed else 0


@dataclass(eq=False)
class Trial:
    """A job of the course, made small, and what became of it."""

    name: str
    spec: JobSpec
    job: Job | None = None  # None before it is submitted, and if it was refused
    trouble: str = ""  # why it was not submitted or has not ended, and what to do
    submitted: float = 0.0
    waited: str = "-"  # seconds in the queue, as exact as the site is polled

    def start(self, site):
        """Submit the job; a refusal is kept."""
        self.submitted = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the rehearsal has one line for each job
                self.job = submit(self.spec, site, resubmit=True)
        except UserError as error:
            self.trouble = str(error)
        print(f"{self.name}: {f'job {self.job.id}' if self.job else 'refused'}", flush=True)

    def ended(self) -> bool:
        """Whether nothing more will happen; note how long the job has waited."""
        if self.job and self.job.finished:
            self.waited = f"{max(0.0, time.monotonic() - self.submitted - self.job.run_time):.0f} s"
        return bool(self.trouble or self.job and self.job.finished)

    def cancel(self):
        """Cancel a job that has not ended, and say so; one that is not cancelled is named too."""
        line = f"cancelled job {self.job.id} ({self.name})"
        try:
            if self.job.finished:
                return
            self.job.cancel()
        except (UserError, TimeoutError) as error:
            line = f"job {self.job.id} ({self.name}) on {self.job.where} may still run: {error}; do: end it by hand"
        with contextlib.suppress(OSError):  # a lost connection: the others are cancelled too
            print(line, flush=True)

    def lines(self) -> list:
        """Return the job's log, without the labels of srun."""
        return unlabelled(self.job.log())

    def advice(self, gpus_exist) -> str:
        """Return what to fix; empty if the job went well. Pretended GPUs do not exist for PyTorch."""
        if not self.trouble and self.job.state != "done":
            return why_it_failed(self.job)
        if not self.trouble and gpus_exist and self.name == "env" and any(NO_GPU in line for line in self.lines()):
            return "PyTorch sees no GPU; is it built for this site's GPUs?"
        return self.trouble


def run_trials(trials, site, at_once, wait):
    """Submit all trials, at most `at_once` at a time, and follow them for at most `wait` seconds.

    Whatever ends it, Ctrl-C too, no job of it is left in Slurm: those that have not ended are cancelled.
    """
    end, waiting, running = time.monotonic() + wait, list(trials), []
    try:
        while (waiting or running) and time.monotonic() < end:
            if waiting and len(running) < at_once:
                running.append(waiting.pop(0))
                running[-1].start(site)
            running = [trial for trial in running if not trial.ended()]
            time.sleep(0.05)
        for trial in (trial for trial in (*running, *waiting) if not trial.ended()):
            state, reason = (trial.job.state, trial.job.reason) if trial.job else ("not submitted", "")
            trial.trouble = f"still {state}{f' ({reason})' * bool(reason)} after {wait:g} s; do: a larger --wait"
    finally:
        for trial in (trial for trial in trials if trial.job):
            trial.cancel()


def smallest(name, spec) -> JobSpec:
    """Return a job of the course with as many processes as ever, and hardly any work: a training run has two steps.

    It writes to a folder of its own, and does not resume from another job's checkpoint.
    """
    out = f"runs/rehearsal/{name}"
    command = [out if word == spec.out else word for word in spec.command]
    lab = re.split("[./]", command[command[0] == "-m"].removesuffix(".py"))[-1]
    if command[:3] == ["-m", "mpdemo", "train"]:
        if "--resume" in command:
            del command[command.index("--resume") : command.index("--resume") + 2]
        command += SMALL
    elif lab in LABS:
        command = [*command[: command.index(out) + 1], *LABS[lab]]
    return dataclasses.replace(spec, out=out, command=tuple(command), requeue=False)


def why_it_failed(job) -> str:
    """Return what a failed job's log shows: what the job env found, or the first cause; else how it ended."""
    if found := re.findall(r"\[FAIL\] (.*)", job.log()):  # by the job env
        return "; ".join(found)
    for first in find(job.log()):
        known, line = first.known, first.line
        return f"{known.what_of(line)}: {known.told(known.do, line)}" if known.seen else line
    return f"{job.state} ({job.reason})" if job.reason else job.state
