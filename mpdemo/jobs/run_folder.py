"""The folder of a run: made, kept from others while a job is submitted, and cleared of the last run's results."""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Generator
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError, wrapped
from mpdemo.jobs.spec import JobSpec

RESULTS = ("exit-status.txt", "exit-status.json", "summary.json")


@contextlib.contextmanager
def alone(spec: JobSpec) -> Generator[Path]:
    """Yield a run's folder, and let no other Python submit to it: it would not find this job yet, and start another."""
    out = make_folder(spec)
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(f"another Python is submitting a job to {spec.out}; do: wait, or give another out=") from None
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
                raise UserError(f"MPDEMO_RUNS is {elsewhere}, but {runs} is there already; do: mv {runs} {runs}.before")
        for folder in (paths.root() / spec.out, paths.root() / paths.SITES):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run's folder {spec.out}: {error.strerror}") from None
    if not os.access(paths.root() / spec.out, os.W_OK | os.X_OK):
        raise UserError(f"cannot write into {spec.out}; work in a folder of your own: export MPDEMO_ROOT=...")
    return paths.root() / spec.out
