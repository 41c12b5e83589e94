"""What a job looks like at one moment: its line of text, its picture, its pieces of HTML. No widget here."""

import html
from dataclasses import dataclass
from pathlib import Path

from mpdemo.notebook.bundle import Bundle

COLOURS = {"pending": "#8a6100", "running": "#0072B2", "done": "#00735a", "cancelled": "#666666"}
FAILED = "#b03a00"  # every other state
LOG_LINES = 12


@dataclass
class Moment:
    """A job as it was when it was asked: `take` asks it once and keeps the answers together."""

    name: str
    state: str
    reason: str
    queue: int | None
    run_time: float
    where: str
    id: str
    out: str
    rows: list
    log: str

    @classmethod
    def take(cls, job):
        """Ask a job everything; a log or metrics that are not there yet are empty."""
        return cls(
            name=Path(job.out).name,
            state=job.state,
            reason=job.reason or "",
            queue=job.queue,
            run_time=job.run_time or 0.0,
            where=job.where,
            id=str(job.id),
            out=Path(job.out).as_posix(),
            rows=job.metrics(),
            log=job.log(),
        )

    @property
    def steps(self) -> list:
        """The rows of the training steps."""
        return [row for row in self.rows if row.get("event", "step") == "step" and "loss" in row]

    @property
    def total(self) -> int | None:
        """The number of steps to come in all, where the run has said it."""
        return next((row["steps"] for row in self.rows if "steps" in row), None)

    @property
    def line(self) -> str:
        """One line that is the same in every run that goes well: no time, no loss, no job number."""
        done = f", {self.steps[-1]['step']} steps" if self.state == "done" and self.steps else ""
        return f"{self.name}: {self.state}{done}"

    def bundle(self) -> Bundle:
        """Return what stays in the notebook: the loss curve where there is one, and the line."""
        if not self.steps:
            return Bundle(self.line)
        from mpdemo import plots  # matplotlib takes a while to load: only when there is something to draw

        picture = plots.curves({self.name: self.steps}, title=f"{self.line}, {self.run_time:.1f} s on {self.where}")
        return Bundle(self.line, png=picture.data["image/png"], width=picture.metadata["image/png"]["width"])

    def head(self) -> str:
        """Return the first line of the live view as HTML: name, state, place, time, latest numbers."""
        colour = COLOURS.get(self.state, FAILED)
        badge = f'<span style="background:{colour};color:#fff;border-radius:4px;padding:1px 8px">{self.state}</span>'
        facts = [f"{self.where}, job {self.id}", f"{self.run_time:.1f} s"]
        if self.state == "pending":
            place = f"position {self.queue} in the queue" if self.queue is not None else "waiting"
            facts = [facts[0], f"{place} ({self.reason})" if self.reason else place]
        elif self.reason:
            facts.append(self.reason)
        if self.steps:
            last = self.steps[-1]
            facts.append(f"step {last['step']}{f' of {self.total}' if self.total else ''}, loss {last['loss']:.4f}")
            if last.get("images_per_second"):
                facts.append(f"{last['images_per_second']:.0f} images/s")
        rest = html.escape(" \N{MIDDLE DOT} ".join(facts))
        return f'<b>{html.escape(self.name)}</b> {badge} <span style="opacity:.75">{rest}</span>'

    def tail(self) -> str:
        """Return the log's last lines as HTML; of a progress bar only what a terminal would show."""
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in self.log.rstrip().split("\n")[-LOG_LINES:]]
        box = (
            "display:flex;flex-direction:column-reverse;max-height:13em;overflow:auto;font-size:12px"  # bottom in view
        )
        pre = "margin:0;line-height:1.35;white-space:pre-wrap"
        return f'<div style="{box}"><pre style="{pre}">{html.escape(chr(10).join(lines))}</pre></div>'

    def chart(self) -> str:
        """Return the loss curve so far as SVG, an empty text before the first step."""
        if not self.steps:
            return ""
        from mpdemo.notebook.plots import svg

        return svg.curve([(row["step"], row["loss"]) for row in self.steps], last_x=self.total)
