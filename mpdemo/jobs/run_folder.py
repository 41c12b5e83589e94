"""A run's folder before its job is submitted: whose it is, on which disk it lies, what is left in it."""

import os
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs.record import RECORD

STALE = ("exit-status.txt", "exit-status.json", "summary.json")


def refuse_folder_of_another(out):
    """A run's folder belongs to the user who submitted its job: nobody takes it for their own, or writes into it."""
    folder = paths.root() / out
    record = folder / RECORD
    if record.exists() and (owner := record.stat().st_uid) != os.getuid():
        yours = "work in a folder of your own: export MPDEMO_ROOT=..., or give another out="
        raise UserError(f"{out} holds the job of another user (number {owner}); {yours}")
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write into {folder}; work in a folder of your own: export MPDEMO_ROOT=...")


def link_runs():
    """Let ``runs/`` lie in ``MPDEMO_RUNS``, on a large disk, by a link; the commands and the job files stay the same.

    Raises
    ------
    UserError
        ``runs/`` is there already and is something else.
    """
    wanted, runs = os.environ.get("MPDEMO_RUNS"), paths.root() / "runs"
    if not wanted or runs.resolve() == Path(wanted).resolve():
        return
    if runs.exists() or runs.is_symlink():
        raise UserError(f"MPDEMO_RUNS is {wanted}, but {runs} is there already; do: mv {runs} {runs}.before")
    Path(wanted).mkdir(parents=True, exist_ok=True)
    runs.symlink_to(Path(wanted).absolute())


def prepare(spec) -> Path:
    """Make the run's folder (Slurm drops a log whose folder is missing) and clear the last run's results from it."""
    out = paths.root() / spec.out
    try:
        link_runs()
        out.mkdir(parents=True, exist_ok=True)
        (paths.root() / paths.SITES).mkdir(parents=True, exist_ok=True)  # by which the job file finds the root
    except OSError as error:
        raise UserError(f"cannot make the run's folder {spec.out}: {error.strerror}") from None
    resumed = any(argument.startswith("--resume") for argument in spec.command)
    for name in STALE if resumed else (*STALE, "metrics.jsonl"):
        (out / name).unlink(missing_ok=True)
    if not resumed and (out / "checkpoints").exists():
        keep = next(out / f"checkpoints.{n}" for n in range(1, 10**6) if not (out / f"checkpoints.{n}").exists())
        (out / "checkpoints").rename(keep)
        print(f"the earlier run's checkpoints are kept in {spec.out}/{keep.name}")
    return out
