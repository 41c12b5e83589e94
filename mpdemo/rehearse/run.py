"""The jobs of a rehearsal, so many at once; none of them outlives it."""

import contextlib
import time

from mpdemo.errors import UserError
from mpdemo.jobs import slurm


def run_trials(trials, site, at_once, wait):
    """Submit all trials, at most `at_once` at a time, and follow them for at most `wait` seconds.

    Whatever ends it, Ctrl-C too, no job of it is left in Slurm: those that have not ended are cancelled.

    Parameters
    ----------
    trials : list of mpdemo.rehearse.trial.Trial
    site : mpdemo.jobs.Site
    """
    end, waiting, started = time.monotonic() + wait, list(trials), []
    try:
        while (waiting or started) and time.monotonic() < end:
            if waiting and len(started) < at_once:
                started.append(waiting.pop(0))
                started[-1].start(site)
            for trial in [trial for trial in started if trial.job is None or trial.job.finished]:
                started.remove(trial)
                if trial.job and in_queue(trial.job):
                    trial.waited = slurm.seconds_in_queue(trial.job.id)
            time.sleep(0.1)
        for trial in started:
            reason = f" ({trial.job.reason})" if trial.job.reason else ""
            trial.late = f"still {trial.job.state}{reason} after {wait:g} s; do: a larger --wait, or a reservation"
        for trial in waiting:
            trial.refusal = f"its turn did not come within {wait:g} s; do: a larger --wait or --at-once"
    finally:
        cancel(started)


def cancel(trials):
    """Cancel what has not ended, and say so; one that is not cancelled is named too."""
    for trial in (trial for trial in trials if trial.job):
        line = f"cancelled job {trial.job.id} ({trial.name})"
        try:
            if trial.job.finished:
                continue
            trial.job.cancel()
        except (UserError, TimeoutError) as error:
            end = "scancel" if in_queue(trial.job) else "kill"
            line = f"job {trial.job.id} ({trial.name}) may still run: {error}; do: {end} {trial.job.id}"
        with contextlib.suppress(OSError):  # after a lost connection nobody reads it; the others are cancelled too
            print(line, flush=True)


def in_queue(job) -> bool:
    """Whether Slurm knows a job by its number; that of a step of the job around us is the number of a process."""
    return job.where.startswith("cluster")
