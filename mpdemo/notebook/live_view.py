"""The live view of a job, or of several: ``await follow(job)`` in a cell.

With a front end it shows state, queue, progress, time left, a growing loss curve, the end of the log and a Cancel
button until all jobs have ended; then a picture and a line of text replace the widget, and are what a saved notebook
keeps. Without one (a test, nbconvert) it waits, and displays the same picture and line once.

It is awaited because the kernel handles the page's messages while a cell awaits: the Cancel button and the interrupt
button work, and the cells below do not start early.
"""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

import ipywidgets as w
from IPython import get_ipython
from IPython.display import HTML, display

from mpdemo.errors import UserError
from mpdemo.jobs import attach
from mpdemo.jobs.job import DAY, Deadline
from mpdemo.notebook.snapshot import Snapshot, labels, together

POLL = 0.25  # s, polling interval
CANCEL_WAIT = 20.0  # s that a cancelled job has to end before the cell stops waiting for it


class JobCancelled(UserError):
    """A job was cancelled from its view; raised so that the cells below do not run."""


async def follow(*jobs, live=None, timeout=3600.0):
    """Show jobs until all of them have ended.

    Parameters
    ----------
    *jobs : Job, str or Path
        A job, or the folder of a run: ``await follow("runs/03_ddp")`` follows a run again, on another day or after the
        page of a notebook that was not saved was reloaded; a saved one shows the view again by itself. Several jobs
        get a line each, and buttons choose the one that is shown in detail.
    live : bool, optional
        Whether to show the widget; by default where there is a front end (`has_front_end`).
    timeout : float
        Seconds that a job may run (and a day in the queue) where there is no widget, which waits without limit.

    Raises
    ------
    JobCancelled
        The Cancel button (for the job in detail) or the interrupt button (for all) was pressed.
    TimeoutError
        A job still waits or runs after `timeout`. It continues.
    """
    if not jobs:
        raise UserError('nothing to follow; give a job, or the folder of a run: await follow("runs/03_ddp")')
    jobs = [attach(job) if isinstance(job, str | Path) else job for job in jobs]
    view = JobWidget(jobs) if (has_front_end() if live is None else live) else None
    try:
        cancelled = await _until_finished(jobs, view, timeout)
    except (KeyboardInterrupt, asyncio.CancelledError):
        cancelled = [job for job in jobs if not job.finished] or jobs  # the same interrupt may have ended them
        await asyncio.gather(*map(_cancel, cancelled), return_exceptions=True)  # the states below say what became of it
    snapshots = [Snapshot.take(job) for job in jobs]
    if view:
        view.replace(snapshots)
    else:
        display(together(snapshots))
    if cancelled:
        ended = [s for s, job in zip(snapshots, jobs, strict=True) if job in cancelled]
        names = ", ".join(f"{snapshot.name} was cancelled ({snapshot.state})" for snapshot in ended)
        raise JobCancelled(f"{names}; the cells below were not run")


async def _until_finished(jobs, view, timeout) -> list:
    """Wait for the end of all jobs, without a view for a limited time; return those that the view has cancelled."""
    cancelled, deadlines = [], [Deadline(timeout, DAY) for _ in jobs]
    while True:
        begin = time.monotonic()
        snapshots = await _read(jobs, view)
        if snapshots is None:
            cancelled.append(jobs[view.taken()])
            with suppress(UserError):  # Slurm does not answer: the job's line says so, and the others continue
                await _cancel(cancelled[-1])
            continue
        if all(snapshot.finished or job in cancelled for snapshot, job in zip(snapshots, jobs, strict=True)):
            return cancelled
        if view:
            view.paint(snapshots)
        else:
            for job, deadline in zip(jobs, deadlines, strict=True):
                deadline.check(job)
        # A long log takes long to read: reading takes at most a fifth of the time.
        await asyncio.sleep(max(POLL, 4 * (time.monotonic() - begin)))


async def _read(jobs, view):
    """Read the jobs' files and ask Slurm, in a thread: neither kernel nor Cancel button, which returns None, waits."""
    reading = asyncio.ensure_future(asyncio.to_thread(lambda: [Snapshot.take(job) for job in jobs]))
    while not (view and view.pressed is not None):
        await asyncio.wait({reading}, timeout=POLL)
        if reading.done():
            return reading.result()
    return None


async def _cancel(job):
    """Cancel a job and wait until it has ended, for at most CANCEL_WAIT."""
    await asyncio.to_thread(job.cancel)
    deadline = time.monotonic() + CANCEL_WAIT
    while time.monotonic() < deadline and not await asyncio.to_thread(lambda: job.finished):
        await asyncio.sleep(POLL)


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

    `pressed` is the job whose Cancel button was pressed, counted from 0; `follow` acts on it.
    """

    def __init__(self, jobs):
        self.pressed = None
        self.header, self.chart, self.log = w.HTML(), w.HTML(), w.HTML(layout=w.Layout(flex="1 1 300px"))
        self.bar = w.FloatProgress(min=0, max=1, layout=w.Layout(width="180px"))
        self.detail = w.ToggleButtons(options=[(name, number) for number, name in enumerate(labels(jobs))])
        self.button = w.Button(description="Cancel", icon="stop", button_style="danger")
        self.button.layout.width = "100px"
        self.button.on_click(self._press)
        again = ", ".join(f'"{Path(job.out).as_posix()}"' for job in jobs)
        hint = w.HTML(f'<small style="opacity:.75">Page reloaded? <code>await follow({again})</code></small>')
        charts = w.HBox([self.chart, self.log], layout=w.Layout(flex_flow="row wrap"))
        choice = [self.detail] if len(jobs) > 1 else []
        self.box = w.VBox([self.header, *choice, charts, w.HBox([self.button, self.bar, hint])])
        self.handle = display(self.box, display_id=True)

    def _press(self, button):
        """Note the click: the page may call this from another thread."""
        self.pressed = self.detail.value
        button.disabled, button.description = True, "Cancelling"

    def taken(self):
        """Return the job whose Cancel button was pressed; the button can be pressed again."""
        pressed, self.pressed = self.pressed, None
        return pressed

    def paint(self, snapshots):
        """Show a snapshot of every job."""
        shown = snapshots[self.detail.value]
        self.header.value = "<br>".join(snapshot.header() for snapshot in snapshots)
        self.chart.value, self.log.value = shown.chart(), shown.log_tail()
        if self.pressed is None:
            self.button.disabled, self.button.description = shown.finished, "Cancel"
        self.bar.layout.visibility = "visible" if shown.total else "hidden"
        self.bar.value = shown.steps[-1]["step"] / shown.total if shown.total and shown.steps else 0

    def replace(self, snapshots):
        """Replace the widget by picture and lines; keep the end of the log of every job that did not succeed."""
        self.handle.update(together(snapshots))
        for snapshot in snapshots:
            if snapshot.state != "done":
                display(HTML(snapshot.header() + snapshot.log_tail()))
        parts = [widget for row in self.box.children for widget in (*getattr(row, "children", ()), row)]
        # A page that was reloaded shows the box of the kernel again, and does not know the display: this is its end.
        self.box.children = [w.HTML("<br>".join(s.header() for s in snapshots) + snapshots[self.detail.value].chart())]
        for widget in parts:
            widget.close()
