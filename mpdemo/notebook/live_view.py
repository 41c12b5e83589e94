"""The live view of a job: ``await follow(job)`` in a cell.

With a front end it shows state, queue, progress, a growing loss curve, the end of the log and a Cancel button until
the job ends; then a picture and a line of text replace the widget, and are what a saved notebook keeps. Without one
(a test, nbconvert) it waits, and displays the same picture and line once.

It is awaited because the kernel handles the page's messages while a cell awaits: the Cancel button and the interrupt
button work, and the cells below do not start early.
"""

import asyncio
import os
import time
from pathlib import Path

import ipywidgets as w
from IPython import get_ipython
from IPython.display import HTML, display

from mpdemo.errors import UserError
from mpdemo.jobs import attach
from mpdemo.jobs.deadline import DAY, Deadline
from mpdemo.jobs.job import FINISHED
from mpdemo.notebook.snapshot import Snapshot

POLL = 0.25  # s, polling interval
CANCEL_WAIT = 20.0  # s that a cancelled job has to end before the cell stops waiting for it


class JobCancelled(UserError):
    """The job was cancelled from its view; raised so that the cells below do not run."""


async def follow(job, *, live=None, timeout=3600.0):
    """Show a job until it ends.

    Parameters
    ----------
    job : Job, str or Path
        A job, or the folder of a run: ``await follow("runs/03_ddp")`` follows a run again, after the page was
        reloaded or on another day.
    live : bool, optional
        Whether to show the widget; by default where there is a front end (`has_front_end`).
    timeout : float
        Seconds that the job may run where there is no front end; time in the queue does not count (a day at most).
        The live view waits without limit.

    Raises
    ------
    JobCancelled
        The Cancel button or the interrupt button was pressed. The job has been cancelled.
    TimeoutError
        The job still waits or runs after `timeout`. It continues.
    """
    job = attach(job) if isinstance(job, str | Path) else job
    view = LiveView(job) if (has_front_end() if live is None else live) else None
    try:
        await _until_finished(job, view, None if view else Deadline(timeout, DAY))
        cancelled = view is not None and view.cancel_pressed
    except (KeyboardInterrupt, asyncio.CancelledError):
        cancelled = True
    if cancelled:
        await _cancel(job)
    snapshot = Snapshot.take(job)
    if view:
        view.replace(snapshot)
    else:
        display(snapshot.bundle())
    if cancelled:
        raise JobCancelled(f"{snapshot.name} was cancelled ({snapshot.state}); the cells below were not run")


async def _until_finished(job, view, deadline):
    """Wait for the end of the job, for the Cancel button of the view, or without a view until the deadline."""
    while True:
        begin = time.monotonic()
        snapshot = await _read(job, view)
        if snapshot is None or snapshot.state in FINISHED:
            return
        if view:
            view.paint(snapshot)
        else:
            deadline.check(job)
        # A long log takes long to read: reading takes at most a fifth of the time.
        await asyncio.sleep(max(POLL, 4 * (time.monotonic() - begin)))


async def _read(job, view):
    """Read the job's files and ask Slurm, in a thread: a slow answer keeps neither kernel nor Cancel button waiting.

    Returns None once the button was pressed.
    """
    reading = asyncio.ensure_future(asyncio.to_thread(Snapshot.take, job))
    while not (view and view.cancel_pressed):
        await asyncio.wait({reading}, timeout=POLL)
        if reading.done():
            return reading.result()
    return None


async def _cancel(job):
    """Cancel the job and wait until it has ended, for at most CANCEL_WAIT."""
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


class LiveView:
    """The widget: created once, updated in every polling interval, replaced by something static at the end."""

    def __init__(self, job):
        self.cancel_pressed = False
        self.header, self.chart, self.log = w.HTML(), w.HTML(), w.HTML(layout=w.Layout(flex="1 1 300px"))
        self.bar = w.FloatProgress(min=0, max=1, layout=w.Layout(width="180px"))
        button = w.Button(description="Cancel", icon="stop", button_style="danger", layout=w.Layout(width="100px"))
        button.on_click(self._press)
        again = f'<code>await follow("{Path(job.out).as_posix()}")</code>'
        hint = w.HTML(f'<small style="opacity:.75">Page reloaded? {again}</small>')
        charts = w.HBox([self.chart, self.log], layout=w.Layout(flex_flow="row wrap"))
        self.box = w.VBox([self.header, charts, w.HBox([button, self.bar, hint])])
        self.handle = display(self.box, display_id=True)

    def _press(self, button):
        """Note the click, on which `follow` acts: the page may call this from another thread."""
        self.cancel_pressed = True
        button.disabled, button.description = True, "Cancelling"

    def paint(self, snapshot):
        """Show a snapshot."""
        self.header.value, self.chart.value = snapshot.header(), snapshot.chart()
        self.log.value = snapshot.log_tail()
        self.bar.layout.visibility = "visible" if snapshot.total else "hidden"
        if snapshot.total and snapshot.steps:
            self.bar.value = snapshot.steps[-1]["step"] / snapshot.total

    def replace(self, snapshot):
        """Replace the widget by picture and line; keep the end of the log unless the job succeeded."""
        self.handle.update(snapshot.bundle())
        if snapshot.state != "done":
            display(HTML(snapshot.header() + snapshot.log_tail()))
        for row in self.box.children:
            for widget in [*getattr(row, "children", ()), row]:
                widget.close()
        self.box.close()
