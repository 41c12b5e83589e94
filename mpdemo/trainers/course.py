"""The jobs of the course, as ``slurm/course.toml`` lists them; that a notebook submits each is in test_notebooks.py."""

import shlex
import time
import tomllib

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec


def jobs_of_course() -> dict:
    """Return the jobs of the course by name: ``03_ddp`` -> `JobSpec`.

    The list is that of the folder one works in, if it has one, else the one that came with mpdemo.
    """
    file, name = paths.slurm_files("course.toml")["course"], ""
    try:
        jobs = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, words in jobs.items():
            jobs[name] = JobSpec(**{"name": name} | words | {"command": shlex.split(words["command"])})
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        raise UserError(f"{file} {name}: {error}; do: write it as its other jobs are") from None
    return jobs


def run_at_once(waiting, start, at_once, wait):
    """Start jobs, at most `at_once` at a time, and yield each item of `waiting` with its job as that ends.

    ``start(item)`` returns the job, or None if it was refused. `TimeoutError` once `wait` seconds have passed.
    """
    end, waiting, running = time.monotonic() + wait, list(waiting), []
    while waiting or running:
        if time.monotonic() > end:
            raise TimeoutError
        if waiting and len(running) < at_once:
            item = waiting.pop(0)
            running.append((item, start(item)))
        for item, job in [(item, job) for item, job in running if job is None or job.finished]:
            running.remove((item, job))
            yield item, job
        time.sleep(0.05)
