"""The folder of a run: its metrics line by line, its summary at the end. Taught in notebooks/00_start_here.ipynb."""

import contextlib
import json
from pathlib import Path

from mpdemo.errors import UserError


def read_rows(text) -> list[dict]:
    """Return the rows of a ``metrics.jsonl``; a line that is half written or damaged is left out."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


class RunLog:
    """The run's folder: ``metrics.jsonl``, one line per step and per epoch, written by rank 0 only.

    Parameters
    ----------
    out : str
    active : bool
        Whether this process writes.
    resumed : tuple of (int, int), optional
        Epoch and step from which a run goes on in its own folder. None: a new run.

    Raises
    ------
    UserError
        The folder cannot be written.
    """

    def __init__(self, out, active, resumed=None):
        self.folder, self.active = Path(out), active
        self.path = self.folder / "metrics.jsonl"
        if not active:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if resumed is None and self.path.exists():
                self.path.replace(self.folder / "metrics.previous.jsonl")
            elif self.path.exists():
                self._drop_after(*resumed)
            self.file = self.path.open("a", buffering=1)
        except OSError as error:
            raise UserError(f"cannot write to --out {out}: {error.strerror}; name a folder of your own") from None

    def _drop_after(self, epoch, step):
        """A resumed run writes on from its checkpoint: drop the lines of the steps that it does again."""
        rows = read_rows(self.path.read_text(errors="replace"))
        kept = [
            row
            for row in rows
            if row.get("step", 0) <= step and (row.get("event") != "epoch" or row.get("epoch", 0) < epoch)
        ]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def write(self, event, **values):
        """Append one JSON object as a line."""
        if self.active:
            self.file.write(json.dumps({"event": event, **values}) + "\n")

    def finish(self, summary):
        """Write ``summary.json`` and close."""
        if self.active:
            self.file.close()
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
