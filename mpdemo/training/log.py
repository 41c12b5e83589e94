"""The folder of a run: its metrics line by line, and its summary at the end. Needs no PyTorch.

Taught in notebooks/12_one_step.ipynb.
"""

import contextlib
import fcntl
import json
from pathlib import Path

from mpdemo.errors import RunFailed, UserError


def rows_in(folder) -> list[dict]:
    """Return the rows of the ``metrics.jsonl`` in a run's folder; a line that is half written is left out."""
    path = Path(folder) / "metrics.jsonl"
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


class RunLog:
    """The run's folder and its ``metrics.jsonl``, which the one active process writes."""

    def __init__(self, out, active):
        self.folder, self.active = Path(out), active
        if not active:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            for old in (
                file for pattern in ("summary.json", "timeline-rank*") for file in self.folder.glob(pattern)
            ):
                old.unlink(missing_ok=True)  # of the run before, which may have had more ranks
            path = self.folder / "metrics.jsonl"
            if path.exists():
                path.replace(self.folder / "metrics.previous.jsonl")
            self.file = path.open("w", buffering=1)
        except OSError as error:
            raise UserError(
                f"cannot write to --out {out}: {error.strerror}; choose another folder"
            ) from None

    def _lock(self):
        """Refuse a folder that another run writes to now; the lock ends with this process."""
        self.lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run writes to --out {self.folder}; let it end, or give another"
            ) from None
        except OSError:  # a file system without locks
            pass

    def write(self, event, **values):
        """Append one JSON object as a line; while the disk is full, Python keeps the line for the next call."""
        if self.active:
            with contextlib.suppress(OSError):
                self.file.write(json.dumps({"event": event, **values}) + "\n")

    def finish(self, summary):
        """Write ``summary.json`` and close; a full disk is a `RunFailed`."""
        if not self.active:
            return
        try:
            self.file.close()
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            self.lock.close()
        except OSError as error:
            raise RunFailed(
                f"the end of the run could not be written to {self.folder}: {error.strerror}"
            ) from None
