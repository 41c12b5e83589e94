"""The jobs that the course submits, which are listed in ``slurm/course.toml``."""

import shlex
import tomllib

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec


def jobs_of_course() -> dict:
    """Return the jobs of the course by name: ``03_ddp`` -> `JobSpec`.

    The list is that of the folder one works in, if it has one, else the one that came with mpdemo.
    That a notebook submits each is in test_notebooks.py.
    """
    file = paths.slurm_files("course.toml")["course"]
    name = ""
    try:
        jobs = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, words in jobs.items():
            jobs[name] = JobSpec(**{"name": name} | words | {"command": shlex.split(words["command"])})
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        raise UserError(f"{file} {name}: {error}; do: write it as its other jobs are") from None
    return jobs
