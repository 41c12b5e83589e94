"""A run's folder as the jobs see it: whose it is, which job it has (``job.json``), what an earlier one left in it."""

import contextlib
import json
import os
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError

RECORD = "job.json"
RESULTS = ("exit-status.txt", "exit-status.json", "summary.json")


def read_text(file) -> str:
    """Return a file's text, empty while there is none."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def write_record(out, record):
    """Write job.json in one step, so that nobody reads half of it."""
    part = Path(out) / (RECORD + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(Path(out) / RECORD)


def read_record(out) -> dict | None:
    """Read a run folder's job.json; None if there is none; `UserError` if it is damaged."""
    text = read_text(Path(out) / RECORD)
    if not text:
        return None
    try:
        record = json.loads(text)
        record["id"], record["where"], record["spec"]["name"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{out}/{RECORD} is damaged; remove it, or submit with resubmit=True") from None
    return record


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
    """Let ``runs/`` lie in ``MPDEMO_RUNS``, on a large disk, by a link; the commands and job files stay the same."""
    wanted, runs = os.environ.get("MPDEMO_RUNS"), paths.root() / "runs"
    if not wanted or runs.resolve() == Path(wanted).resolve():
        return
    if runs.exists() or runs.is_symlink():
        raise UserError(f"MPDEMO_RUNS is {wanted}, but {runs} is there already; do: mv {runs} {runs}.before")
    Path(wanted).mkdir(parents=True, exist_ok=True)
    runs.symlink_to(Path(wanted).absolute())


def make_folder(spec) -> Path:
    """Make the folder of a run, in which Slurm writes the log, and the one by which a job file finds the root."""
    try:
        link_runs()
        for folder in (paths.root() / spec.out, paths.root() / paths.SITES):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run's folder {spec.out}: {error.strerror}") from None
    return paths.root() / spec.out


@contextlib.contextmanager
def prepared(spec):
    """Yield the run's folder, and move the last run's results aside: they would be taken for those of the new job.

    Where the submission is refused, they go back to their places.
    """
    out = make_folder(spec)
    resumed = any(argument.startswith("--resume") for argument in spec.command)
    names = RESULTS if resumed else (*RESULTS, "metrics.jsonl")
    moved = {out / name: out / name.replace(".", ".previous.") for name in names}
    if not resumed:
        keep = next(out / f"checkpoints.{n}" for n in range(1, 10**6) if not (out / f"checkpoints.{n}").exists())
        moved[out / "checkpoints"] = keep
    moved = {path: aside for path, aside in moved.items() if path.exists()}
    for path, aside in moved.items():
        path.replace(aside)
    try:
        yield out
    except BaseException:
        for path, aside in moved.items():
            aside.replace(path)
        raise
    if out / "checkpoints" in moved:
        print(f"the earlier run's checkpoints are kept in {spec.out}/{keep.name}")
