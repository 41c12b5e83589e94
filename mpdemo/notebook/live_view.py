"""The live view of a job, or of several: ``await follow(job)`` in a cell.

In JupyterLab it shows a widget until all jobs have ended; then a picture and a line of text replace it, and are what
a saved notebook keeps. Without one (a test, nbconvert) it waits, and displays the same picture and line once.

It is awaited because the kernel handles the page's messages while a cell awaits: the Cancel button and the interrupt
button work, and the cells below do not start early. Cancel ends the job. The interrupt leaves it running and only ends
the wait, because a page that was reloaded has lost its view, and the kernel runs no other cell before that.
"""

import asyncio
import html
import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import ipywidgets as w
from IPython import get_ipython
from IPython.display import HTML, display

from mpdemo.errors import UserError
from mpdemo.jobs import attach
from mpdemo.jobs.follow import detached
from mpdemo.notebook.snapshot import Snapshot, labels, together

POLL = 0.25  # s, polling interval
CANCEL_WAIT = 20.0  # s that a cancelled job has to end before the cell stops waiting for it


class JobCancelled(UserError):
    """A job was cancelled from its view; raised so that the cells below do not run."""


class Detached(UserError):
    """The interrupt button was pressed, and the jobs run on; raised so that the cells below do not run."""


async def follow(*jobs, timeout=3600.0):
    """Show jobs until all of them have ended: live in JupyterLab and the like (`has_front_end`), else at their end.

    Parameters
    ----------
    *jobs : Job, str or Path
        A job, or the folder of a run: ``await follow("runs/03_ddp")`` follows a run again, on another day or after
        the page of a notebook that was not saved was reloaded (interrupt the kernel first); a saved and trusted one
        shows the view again by itself. Several jobs get a line each, and buttons choose the one shown in detail.
    timeout : float
        Seconds that a job may run (and a day in the queue) where there is no widget, which waits without limit.

    Raises
    ------
    JobCancelled
        The Cancel button was pressed, which ends the job shown in detail.
    Detached
        The interrupt button was pressed. The jobs continue.
    TimeoutError
        A job still waits or runs after `timeout`. It continues.
    """
    jobs = [attach(job) if isinstance(job, str | Path) else job for job in jobs]
    view, interrupted = JobWidget(jobs) if has_front_end() else None, False
    try:
        await (view.until_finished() if view else _until_finished(jobs, timeout))
    except (KeyboardInterrupt, asyncio.CancelledError):
        interrupted = True
    snapshots = await asyncio.to_thread(lambda: [Snapshot(job) for job in jobs])  # Slurm may be slow
    view.replace(snapshots) if view else display(together(snapshots))
    if interrupted:
        left = [f"{s.line}." if s.finished else detached(job) for s, job in zip(snapshots, jobs, strict=True)]
        raise Detached(" ".join([*left, "The cells below were not run."]))
    if view and view.cancelled:
        ended = [snapshot for snapshot, job in zip(snapshots, jobs, strict=True) if job in view.cancelled]
        names = ", ".join(f"{snapshot.name} was cancelled ({snapshot.state})" for snapshot in ended)
        raise JobCancelled(f"{names}; the cells below were not run")


async def _until_finished(jobs, timeout):
    """Wait for the end of all jobs for a limited time; an interrupt leaves no thread that still waits."""
    for job in jobs:
        looks = job.waiting(timeout)
        while await asyncio.to_thread(next, looks, "ended") != "ended":  # Slurm may be slow
            await asyncio.sleep(0.1)


def _end(jobs):
    """Cancel jobs and wait until they have ended, for at most CANCEL_WAIT."""
    for job in jobs:
        with suppress(UserError):  # Slurm does not answer: the job's line says so
            job.cancel()
    deadline = time.monotonic() + CANCEL_WAIT
    with suppress(UserError):
        while time.monotonic() < deadline and not all(job.finished for job in jobs):
            time.sleep(POLL)


def has_front_end() -> bool:
    """Return whether a widget can be seen and used: in a kernel of Jupyter's server or of VS Code, not in a test."""
    if {"PYTEST_CURRENT_TEST", "NBVAL"} & os.environ.keys():
        return False
    shell = get_ipython()
    if not hasattr(shell, "kernel"):
        return False
    return "JPY_SESSION_NAME" in os.environ or "__vsc_ipynb_file__" in shell.user_ns


class JobWidget:
    """A line for every job, and one of them in detail: its loss curve, the end of its log, a Cancel button.

    `cancelled` holds the jobs whose Cancel button was pressed, and the thread that ends each.
    """

    def __init__(self, jobs):
        self.jobs, self.cancelled = jobs, {}
        names = labels(jobs)
        self.detail = w.ToggleButtons(options=[(name, number) for number, name in enumerate(names)])
        self.button = w.Button(description="Cancel", icon="stop", button_style="danger")
        self.button.on_click(self._press)
        again = f"await follow({', '.join(json.dumps(job.folder) for job in jobs)})"
        first = "interrupt the kernel, which leaves the job running, then run"
        hint = f"Page reloaded? If the view is gone, {first} <code>{html.escape(again)}</code>"
        hint = w.HTML(f'<small style="opacity:.75">{hint}</small>')
        self.lines, self.shown = w.HTML(), w.HTML()
        row = w.HBox([self.button, hint])
        self.parts = [self.button, hint, row, self.detail, self.lines, self.shown]
        choice = [self.detail] if len(jobs) > 1 else []
        self.box = w.VBox([self.lines, *choice, self.shown, row])
        shown = ", ".join(f"{job.folder} (job {job.id} on {job.where})" for job in jobs)
        # A page that shows no widgets, as that of a notebook that is not trusted, shows this text.
        text = f"Live view of {shown}. If this text is all you see, {first}: {again}"
        self.handle = display(self.box._repr_mimebundle_() | {"text/plain": text}, raw=True, display_id=True)

    def _press(self, button):
        """Cancel the job in detail, in a thread: the answer of Slurm may take long."""
        job = self.jobs[self.detail.value]
        self.cancelled[job] = threading.Thread(target=_end, args=([job],), daemon=True)
        self.cancelled[job].start()

    async def until_finished(self):
        """Show the jobs until all have ended, or are no longer waited for."""
        while True:
            begin = time.monotonic()
            snapshots = await asyncio.to_thread(lambda: [Snapshot(job) for job in self.jobs])  # Slurm may be slow
            ended = self.given_up()
            if all(snapshot.finished or job in ended for snapshot, job in zip(snapshots, self.jobs, strict=True)):
                return
            self.paint(snapshots)
            # A long log takes long to read: reading takes at most a fifth of the time.
            await asyncio.sleep(max(POLL, 4 * (time.monotonic() - begin)))

    def given_up(self) -> list:
        """Return the cancelled jobs that have ended, or are no longer waited for."""
        return [job for job, thread in self.cancelled.items() if not thread.is_alive()]

    def paint(self, snapshots):
        """Show a snapshot of every job."""
        shown = snapshots[self.detail.value]
        self.lines.value = "<br>".join(snapshot.header() for snapshot in snapshots)
        self.shown.value = shown.chart() + shown.log_tail()
        cancelled = self.jobs[self.detail.value] in self.cancelled
        self.button.disabled = shown.finished or cancelled
        self.button.description = "Cancelling" if cancelled else "Cancel"

    def replace(self, snapshots):
        """Replace the widget by picture and lines; keep the end of the log of every job that did not succeed."""
        self.handle.update(together(snapshots))
        for snapshot in snapshots:
            if snapshot.state != "done":
                display(HTML(snapshot.header() + snapshot.log_tail()))
        # A page that was reloaded shows the box of the kernel again, and does not know the display: this is its end.
        self.box.children = [w.HTML("<br>".join(s.header() for s in snapshots) + snapshots[self.detail.value].chart())]
        for widget in reversed(self.parts):  # a row that is left with a closed button could not be loaded again
            widget.close()
