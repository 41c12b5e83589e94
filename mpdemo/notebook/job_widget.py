"""How a job is shown in a notebook: at one moment, in text, HTML and a picture; and the widget that repeats it."""

import asyncio
import html
import threading
import time
from collections import ChainMap
from contextlib import suppress
from pathlib import Path

import ipywidgets as w
from IPython.display import HTML, display

from mpdemo.errors import UserError
from mpdemo.foreign import DAMAGED
from mpdemo.notebook.plots import curves
from mpdemo.notebook.plots.style import BLUE
from mpdemo.notebook.show import Bundle

COLOURS = {"pending": "#8a6100", "running": BLUE, "done": "#00735a", "cancelled": "#666666"}
FAILED = "#b03a00"  # every other state
LOG_LINES = 12
MOST_POINTS = 200  # of a curve: more are not visible where it is as wide as the page
LEFT, RIGHT, BOTTOM, HEIGHT = 52, 430, 136, 114  # of the curve, in CSS pixels
POLL = 0.25  # s between two looks at the job
CANCEL_WAIT = 20.0  # s that a cancelled job has to end before the cell stops waiting for it


class JobView:
    """A job at one moment: state, metrics and log, all read at once; what does not exist yet is empty."""

    def __init__(self, job):
        self.finished = job.finished  # first: what is read after it is then the end
        self.state, self.reason, self.queue = job.state, job.reason, job.queue
        self.run_time, self.where, self.id, self.out = job.run_time, job.where, job.id, job.out
        self.log, self.name = job.log(), Path(job.out).name
        rows = job.metrics()
        self.steps = [
            row for row in rows if row.get("event") == "step" and isinstance(row.get("step"), int)
        ]
        self.steps = [row for row in self.steps if isinstance(row.get("loss"), int | float)]
        # of the whole run, where its rows contain it; a resumed one may have more
        self.total = next(
            (row["steps"] for row in reversed(rows) if isinstance(row.get("steps"), int)), None
        )

    @property
    def line(self) -> str:
        """One line that is equal in every successful run: no time, no loss, no job number."""
        done = f", {self.steps[-1]['step']} steps" if self.state == "done" and self.steps else ""
        return f"{self.name}: {self.state}{done}"

    def header(self) -> str:
        """Return the first line of the live view as HTML: name, state, place, time, latest numbers."""
        colour = COLOURS.get(self.state, FAILED)
        look, state = (
            f"background:{colour};color:#fff;border-radius:4px;padding:1px 8px",
            html.escape(self.state),
        )
        badge = f'<span style="{look}">{state}</span>'
        if self.state == "pending":
            place = "waiting" if self.queue is None else f"position {self.queue} in the queue"
            facts = [f"{place} ({self.reason})" if self.reason else place]
        else:
            facts = [f"{self.run_time:.1f} s", self.reason]
            with suppress(*DAMAGED):  # a row may hold anything
                facts.extend(self._progress())
        text = html.escape(" \N{MIDDLE DOT} ".join(filter(None, [f"{self.where}, job {self.id}", *facts])))
        line = f'<b>{html.escape(self.name)}</b> {badge} <span style="opacity:.75">{text}</span>'
        if self.state == "running" and self.total and self.steps:
            line += f' <progress value="{self.steps[-1]["step"]}" max="{self.total}"></progress>'
        return f"<div>{line}</div>"

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

    def log_tail(self) -> str:
        """Return the log's last lines as HTML; of a progress bar only its last state, as a terminal does."""
        lines = [
            line.rstrip("\r").rpartition("\r")[2] for line in self.log.rstrip().split("\n")[-LOG_LINES:]
        ]
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
        rows = [*self.steps[:-1:every], self.steps[-1]]
        first, last = rows[0]["step"], rows[-1]["step"]
        low, high = min(row["loss"] for row in rows), max(row["loss"] for row in rows)

        def x(step):
            return LEFT + (RIGHT - LEFT) * (step - first) / (last - first or 1)

        def y(loss):
            return BOTTOM - HEIGHT * (loss - low) / (high - low or 1)

        text = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'
        marks = [
            (LEFT, 12, "start", "loss"),
            (LEFT, 152, "start", first),
            (RIGHT, 152, "end", f"step {last}"),
        ]
        for loss in (low, (low + high) / 2, high):
            marks.append((LEFT - 5, y(loss) + 4, "end", f"{loss:.3g}"))
        points = " ".join(f"{x(row['step']):.1f},{y(row['loss']):.1f}" for row in rows)
        look = 'style="max-width:100%" fill="currentColor" font-size="11" font-family="sans-serif"'
        return (
            f'<svg role="img" aria-label="loss {rows[-1]["loss"]:.4g} at step {last}" viewBox="0 0 440 160" '
            f'width="440" height="160" {look}>{"".join(text.format(*mark) for mark in marks)}'
            f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="2"/></svg>'
        )


async def view_of(job) -> JobView:
    """Look at a job in a thread, since Slurm may be slow."""
    return await asyncio.to_thread(JobView, job)


def picture_of(view) -> Bundle:
    """Return what stays in the notebook: the job's line, and its loss curve where there is one."""
    if not view.steps:
        return Bundle(view.line)
    picture = curves({view.name: view.steps}, title=f"{view.line}, {view.run_time:.1f} s on {view.where}")
    picture.data["text/plain"] = view.line
    return picture


class JobWidget:
    """A job while it runs: its state, its loss curve, the end of its log, a Cancel button."""

    def __init__(self, job):
        self.job = job
        self.cancelling = None  # the thread that ends the job, once the Cancel button was pressed
        self.button = w.Button(description="Cancel", icon="stop", button_style="danger")
        self.button.on_click(self._press)
        again = "interrupt the kernel, which leaves the job running, then run the cell again"
        hint = w.HTML(f'<small style="opacity:.75">Page reloaded? If the view is gone, {again}</small>')
        self.shown = w.HTML()
        row = w.HBox([self.button, hint])
        self.parts = [self.button, hint, row, self.shown]
        self.box = w.VBox([self.shown, row])
        # A page that shows no widgets, as that of a notebook that is not trusted, shows this text.
        live = f"Live view of {job.folder} (job {job.id} on {job.where})"
        text = f"{live}. If this text is all you see, {again}."
        self.handle = display(
            self.box._repr_mimebundle_() | {"text/plain": text}, raw=True, display_id=True
        )

    def _press(self, button):
        """Cancel the job, in a thread: the answer of Slurm may take long."""
        self.cancelling = threading.Thread(target=_end, args=(self.job,), daemon=True)
        self.cancelling.start()

    async def until_finished(self):
        """Show the job until it has ended, or is no longer waited for after it was cancelled."""
        while True:
            begin = time.monotonic()
            view = await view_of(self.job)
            if view.finished or (self.cancelling and not self.cancelling.is_alive()):
                return
            self.paint(view)
            # A long log takes long to read: reading takes at most a fifth of the time.
            await asyncio.sleep(max(POLL, 4 * (time.monotonic() - begin)))

    def paint(self, view):
        """Show the job as it was seen."""
        self.shown.value = view.header() + view.chart() + view.log_tail()
        self.button.disabled = self.cancelling is not None
        self.button.description = "Cancelling" if self.cancelling else "Cancel"

    def replace(self, view):
        """Replace the widget by picture and line; keep the end of the log of a job that did not succeed."""
        self.handle.update(picture_of(view))
        if view.state != "done":
            display(HTML(view.header() + view.log_tail()))
        # A page that was reloaded shows the box of the kernel again, and does not know the display: this is its end.
        self.box.children = [w.HTML(view.header() + view.chart())]
        # a row that is left with a closed button could not be loaded again
        for widget in reversed(self.parts):
            widget.close()


def _end(job):
    """Cancel a job and wait until it has ended, for at most CANCEL_WAIT."""
    deadline = time.monotonic() + CANCEL_WAIT
    with suppress(UserError):  # Slurm does not answer: the job's line says so
        job.cancel()
    with suppress(UserError):
        while time.monotonic() < deadline and not job.finished:
            time.sleep(POLL)
