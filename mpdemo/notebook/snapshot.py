"""Jobs at one moment, and how they are displayed: a line of text, a picture, pieces of HTML. No widget here."""

import html
from collections import ChainMap
from pathlib import Path

from mpdemo.notebook.plots import curves
from mpdemo.notebook.plots.style import BLUE
from mpdemo.notebook.show import Bundle

COLOURS = {"pending": "#8a6100", "running": BLUE, "done": "#00735a", "cancelled": "#666666"}
FAILED = "#b03a00"  # every other state
LOG_LINES = 12
MOST_POINTS = 200  # of a curve: more are not visible where it is as wide as the page
LEFT, RIGHT, BOTTOM = 52, 430, 136  # of the curve, in CSS pixels


class Snapshot:
    """The state, the metrics and the log of a job, all read at once; what does not exist yet is empty."""

    def __init__(self, job):
        self.finished = job.finished  # first: what is read after it is then the end
        self.state, self.reason, self.queue = job.state, job.reason, job.queue
        self.run_time, self.where, self.id, self.out = job.run_time, job.where, job.id, job.out
        self.log, self.name = job.log(), Path(job.out).name
        rows = job.metrics()
        self.steps = [row for row in rows if row["event"] == "step"]
        # of the whole run, where its rows contain it; a resumed one may have more
        self.total = next((row["steps"] for row in reversed(rows) if "steps" in row), None)

    @property
    def line(self) -> str:
        """One line that is equal in every successful run: no time, no loss, no job number."""
        done = f", {self.steps[-1]['step']} steps" if self.state == "done" and self.steps else ""
        return f"{self.name}: {self.state}{done}"

    def header(self) -> str:
        """Return the first line of the live view as HTML: name, state, place, time, latest numbers."""
        colour = COLOURS.get(self.state, FAILED)
        badge = f'<span style="background:{colour};color:#fff;border-radius:4px;padding:1px 8px">{self.state}</span>'
        if self.state == "pending":
            place = "waiting" if self.queue is None else f"position {self.queue} in the queue"
            facts = [f"{place} ({self.reason})" if self.reason else place]
        else:
            facts = [f"{self.run_time:.1f} s", self.reason, *self._progress()]
        text = html.escape(" \N{MIDDLE DOT} ".join(filter(None, [f"{self.where}, job {self.id}", *facts])))
        line = f'<b>{html.escape(self.name)}</b> {badge} <span style="opacity:.75">{text}</span>'
        if self.state == "running" and self.total and self.steps:
            line += f' <progress value="{self.steps[-1]["step"]}" max="{self.total}"></progress>'
        return line

    def _progress(self):
        """Yield what the latest steps say, in words."""
        if not self.steps:
            return
        latest = dict(ChainMap(*reversed(self.steps)))  # some values are not measured in every step
        yield f"step {latest['step']}{f' of {self.total}' if self.total else ''}, loss {latest['loss']:.4f}"
        if latest.get("images_per_second"):
            yield f"{latest['images_per_second']:.0f} images/s"
        if "peak_memory_mib" in latest:
            yield f"memory {', '.join(f'{mib:.0f}' for mib in latest['peak_memory_mib'])} MiB"
        if shares := latest.get("utilisation"):
            yield f"{sum(shares) / len(shares):.0%} busy"
        if "mfu" in latest:
            yield f"MFU {latest['mfu']:.1%}"

    def log_tail(self) -> str:
        """Return the log's last lines as HTML; of a progress bar only its last state, as a terminal does."""
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in self.log.rstrip().split("\n")[-LOG_LINES:]]
        # Columns in reverse keep the box scrolled to its end.
        box = "display:flex;flex-direction:column-reverse;max-height:13em;overflow:auto;font-size:12px"
        # Without flex-shrink the box would shrink the text and hide the newest lines.
        pre = "margin:0;line-height:1.35;white-space:pre-wrap;flex-shrink:0"
        return f'<div style="{box}"><pre style="{pre}">{html.escape(chr(10).join(lines))}</pre></div>'

    def chart(self) -> str:
        """Return the loss curve of the steps so far as inline SVG, with text in the colour of the page."""
        if not self.steps:
            return ""
        every = max(1, len(self.steps) // MOST_POINTS)
        points = [(row["step"], row["loss"]) for row in [*self.steps[:-1:every], self.steps[-1]]]
        (first, _), (last, loss), losses = points[0], points[-1], [y for _, y in points]
        width, low, height = last - first or 1, min(losses), max(losses) - min(losses) or 1
        x, y = (
            (lambda step: LEFT + (RIGHT - LEFT) * (step - first) / width),
            (lambda loss: BOTTOM - 114 * (loss - low) / height),
        )
        text = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'
        marks = [(LEFT, 12, "start", "loss"), (LEFT, 152, "start", first), (RIGHT, 152, "end", f"step {last}")]
        marks += [(LEFT - 5, y(loss) + 4, "end", f"{loss:.3g}") for loss in (low, low + height / 2, low + height)]
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        look = 'style="max-width:100%" fill="currentColor" font-size="11" font-family="sans-serif"'
        return (
            f'<svg role="img" aria-label="loss {loss:.4g} at step {last}" viewBox="0 0 440 160" width="440" '
            f'height="160" {look}>{"".join(text.format(*mark) for mark in marks)}'
            f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2"/></svg>'
        )


def together(snapshots) -> Bundle:
    """Return what stays in the notebook: a line per job, and the loss curves in one picture where there are some."""
    lines = "\n".join(snapshot.line for snapshot in snapshots)
    trained = [snapshot for snapshot in snapshots if snapshot.steps]
    if not trained:
        return Bundle(lines)
    title = "\n".join(f"{s.line}, {s.run_time:.1f} s on {s.where}" for s in trained)
    picture = curves(dict(zip(labels(trained), (s.steps for s in trained), strict=True)), title=title)
    picture.data["text/plain"] = lines
    return picture


def labels(jobs) -> list[str]:
    """Return what to call jobs or snapshots: by the folder's name, and by the number too where a name repeats."""
    names = [Path(job.out).name for job in jobs]
    return [f"{name} (job {job.id})" if names.count(name) > 1 else name for name, job in zip(names, jobs, strict=True)]
