"""What a run's folder knows of its job: ``job.json``, written when the job is submitted."""

import json
from pathlib import Path

from mpdemo.errors import UserError

RECORD = "job.json"


def read_text(file) -> str:
    """A file's text, empty while there is none."""
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
    """Read a run folder's job.json; None if there is none.

    Raises
    ------
    UserError
        The file is damaged.
    """
    text = read_text(Path(out) / RECORD)
    if not text:
        return None
    try:
        record = json.loads(text)
        record["id"], record["where"], record["spec"]["name"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{out}/{RECORD} is damaged; remove it, or submit with resubmit=True") from None
    return record
