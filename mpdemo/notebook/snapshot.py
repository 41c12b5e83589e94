"""Jobs at one moment, and how they are displayed: a line of text, a picture, pieces of HTML. No widget here."""

import html
from dataclasses import dataclass
from pathlib import Path

from mpdemo.jobs import times
from mpdemo.jobs.job import FINISHED
from mpdemo.notebook.bundle import Bundle
from mpdemo.notebook.plots import curves, svg

COLOURS = {"pending": "#8a6100", "running": "#0072B2", "done": "#00735a", "cancelled": "#666666"}
FAILED = "#b03a00"  # every other state
LOG_LINES = 12
DEVICES = 4  # whose memory is written out


@dataclass
class Snapshot:
    """The state, the metrics and the log of a job, all read once by `take`."""

    name: str
    state: str
    reason: str
    queue: int | None
    run_time: float
    where: str
    id: str
    rows: list
    log: str

    @classmethod
    def take(cls, job):
        """Read everything from a job; a log or metrics that do not exist yet are empty."""
        return cls(
            name=Path(job.out).name,
            state=job.state,
            reason=job.reason,
            queue=job.queue,
            run_time=job.run_time,
            where=job.where,
            id=str(job.id),
            rows=job.metrics(),
            log=job.log(),
        )

    @property
    def steps(self) -> list:
        """The rows of the training steps."""
        return [row for row in self.rows if row["event"] == "step"]

    @property
    def total(self) -> int | None:
        """The number of steps of the whole run, where its rows contain it; a resumed one may have more steps."""
        return next((row["steps"] for row in reversed(self.rows) if "steps" in row), None)

    @property
    def finished(self) -> bool:
        """Whether the state will not change any more."""
        return self.state in FINISHED

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the remaining steps will take at the pace of those that were logged; None while unknown."""
        if self.state != "running" or not self.total:
            return None
        starts = [number for number, row in enumerate(self.rows) if row["event"] == "start"]
        since = self.rows[starts[-1] :] if starts else self.rows  # a resumed run has the steps of the first one as well
        timed = [(row["step"], row["time"]) for row in since if row["event"] == "step" and "time" in row]
        if len(timed) < 2:
            return None
        (first, begin), (last, end) = timed[0], timed[-1]
        return (end - begin) / (last - first) * (self.total - last) if last > first else None

    @property
    def line(self) -> str:
        """One line that is equal in every successful run: no time, no loss, no job number."""
        done = f", {self.steps[-1]['step']} steps" if self.state == "done" and self.steps else ""
        return f"{self.name}: {self.state}{done}"

    def header(self) -> str:
        """Return the first line of the live view as HTML: name, state, place, time, latest numbers."""
        colour = COLOURS.get(self.state, FAILED)
        badge = f'<span style="background:{colour};color:#fff;border-radius:4px;padding:1px 8px">{self.state}</span>'
        facts = [f"{self.where}, job {self.id}"]
        if self.state == "pending":
            place = f"position {self.queue} in the queue" if self.queue is not None else "waiting"
            facts.append(f"{place} ({self.reason})" if self.reason else place)
        else:
            facts += [f"{self.run_time:.1f} s", *([self.reason] if self.reason else [])]
        if self.steps:
            last = self.steps[-1]
            facts.append(f"step {last['step']}{f' of {self.total}' if self.total else ''}, loss {last['loss']:.4f}")
            if last.get("images_per_second"):
                facts.append(f"{last['images_per_second']:.0f} images/s")
            if memory := [row["peak_memory_mib"] for row in self.steps if "peak_memory_mib" in row]:
                facts.append(memory_text(memory[-1]))
            if (left := self.seconds_left) is not None:
                facts.append(f"about {times.duration(left)} left")
        text = html.escape(" \N{MIDDLE DOT} ".join(facts))
        return f'<b>{html.escape(self.name)}</b> {badge} <span style="opacity:.75">{text}</span>'

    def log_tail(self) -> str:
        """Return the log's last lines as HTML; of a progress bar only its last state, as a terminal does."""
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in self.log.rstrip().split("\n")[-LOG_LINES:]]
        # Columns in reverse keep the box scrolled to its end.
        box = "display:flex;flex-direction:column-reverse;max-height:13em;overflow:auto;font-size:12px"
        pre = "margin:0;line-height:1.35;white-space:pre-wrap"
        return f'<div style="{box}"><pre style="{pre}">{html.escape(chr(10).join(lines))}</pre></div>'

    def chart(self) -> str:
        """Return the loss curve so far as SVG, an empty text before the first step."""
        return svg.curve([(row["step"], row["loss"]) for row in self.steps], self.total) if self.steps else ""


def together(snapshots) -> Bundle:
    """Return what stays in the notebook: a line per job, and the loss curves in one picture where there are some."""
    lines = "\n".join(snapshot.line for snapshot in snapshots)
    trained = [snapshot for snapshot in snapshots if snapshot.steps]
    if not trained:
        return Bundle(lines)
    title = "\n".join(f"{s.line}, {s.run_time:.1f} s on {s.where}" for s in trained)
    steps = (snapshot.steps for snapshot in trained)
    picture = curves(dict(zip(labels([(s.name, s.id) for s in trained]), steps, strict=True)), title=title)
    picture.data["text/plain"] = lines
    return picture


def memory_text(mib) -> str:
    """Return the peak memory of some devices in words: each number, or of many devices the least and the most."""
    if len(mib) > DEVICES:
        return f"memory {min(mib):.0f} to {max(mib):.0f} MiB on {len(mib)} devices"
    return f"memory {', '.join(f'{m:.0f}' for m in mib)} MiB"


def labels(jobs) -> list[str]:
    """Return what to call jobs, given as (name, number): by the name, and by the number too where a name repeats.

    Examples
    --------
    >>> labels([("ddp", "7"), ("ddp", "8"), ("single", "9")])
    ['ddp (job 7)', 'ddp (job 8)', 'single']
    """
    names = [name for name, _ in jobs]
    return [f"{name} (job {number})" if names.count(name) > 1 else name for name, number in jobs]
