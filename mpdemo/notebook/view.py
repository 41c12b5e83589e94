"""The live job view: ``await follow(job)`` in a cell.

Where somebody sits in front of the page: state, queue, progress, a growing loss curve, the end of the log and a
Cancel button, until the job ends; then the widget gives way to a picture and a line of text, which are what a
saved notebook keeps. Everywhere else (a test, nbconvert): it waits, and displays the same picture and line once.

It is awaited because a cell that awaits lets the page's messages through: the Cancel button and the interrupt
button both work while it waits, and the cells below do not start early.
"""

import asyncio
import os
import time
from pathlib import Path

import ipywidgets as w
from IPython import get_ipython
from IPython.display import HTML, display

from mpdemo.errors import UserError
from mpdemo.notebook.moment import Moment

POLL = 0.25  # s between two looks at the job
CANCEL_WAIT = 20.0  # s a cancelled job gets to end before the cell gives up on seeing it


class JobCancelled(UserError):
    """The job was cancelled from its view; raised so that the cells below do not run."""


async def follow(job, *, live=None, timeout=3600.0):
    """Show a job until it ends.

    Parameters
    ----------
    job : Job, str or Path
        A job, or the folder of a run: ``await follow("runs/03_ddp")`` takes up a run again, after a page was
        reloaded or on another day.
    live : bool, optional
        Whether somebody can see and press a widget; found out by itself (`has_front_end`).
    timeout : float
        Seconds to wait where there is no front end. The live view waits as long as the reader wants.

    Raises
    ------
    JobCancelled
        The Cancel button or the interrupt button was pressed. The job has been cancelled.
    TimeoutError
        The job still waits or runs at the end of `timeout`. It goes on.
    """
    job = _job(job)
    view = LiveView(job) if (has_front_end() if live is None else live) else None
    end = None if view else time.monotonic() + timeout
    stop = None
    try:
        await _until_finished(job, view, end)
    except (KeyboardInterrupt, asyncio.CancelledError):
        stop = "interrupted"
    if stop or (view and view.cancel_pressed):
        await _cancel(job)
        stop = "cancelled"
    moment = Moment.take(job)
    if view:
        view.replace(moment)
    else:
        display(moment.bundle())
    if stop:
        raise JobCancelled(f"{moment.name} was cancelled ({moment.state}); the cells below were not run")


async def _until_finished(job, view, end):
    """Wait for the end of the job, the press of a button, or the time `end`."""
    while not job.finished:
        before = time.monotonic()
        if view:
            view.paint(Moment.take(job))
            if view.cancel_pressed:
                return
        elif before > end:
            why = f" ({job.reason})" if job.reason else ""
            again = f'await follow("{Path(job.out).as_posix()}")'
            raise TimeoutError(f"{Path(job.out).name} is still {job.state}{why}; it goes on; follow it again: {again}")
        # A long log takes long to read: never spend more than a fifth of the time on looking.
        await asyncio.sleep(max(POLL, 4 * (time.monotonic() - before)))


async def _cancel(job):
    """Cancel the job and wait, not for ever, until it has ended."""
    job.cancel()
    end = time.monotonic() + CANCEL_WAIT
    while not job.finished and time.monotonic() < end:
        await asyncio.sleep(POLL)


def _job(job):
    """Return the job of a run's folder; a job stays itself."""
    if not isinstance(job, str | Path):
        return job
    from mpdemo.jobs import attach

    return attach(job)


def has_front_end() -> bool:
    """Return whether somebody can see and answer a widget: a kernel of Jupyter's server or of VS Code, no test."""
    if {"PYTEST_CURRENT_TEST", "NBVAL"} & os.environ.keys():
        return False
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return False
    return "JPY_SESSION_NAME" in os.environ or "__vsc_ipynb_file__" in shell.user_ns


class LiveView:
    """The widget: built once, painted at every look, replaced by something static at the end."""

    def __init__(self, job):
        self.cancel_pressed = False
        self.head, self.chart, self.log = w.HTML(), w.HTML(), w.HTML(layout=w.Layout(flex="1 1 300px"))
        self.bar = w.FloatProgress(min=0, max=1, layout=w.Layout(width="180px"))
        self.button = w.Button(description="Cancel", icon="stop", button_style="danger", layout=w.Layout(width="100px"))
        self.button.on_click(self._press)
        again = (
            f'<small style="opacity:.75">Page reloaded? <code>await follow("{Path(job.out).as_posix()}")</code></small>'
        )
        self.parts = [self.head, self.bar, self.button, self.chart, self.log, w.HTML(again)]
        controls = w.HBox([self.button, self.bar, self.parts[-1]])
        self.box = w.VBox([self.head, w.HBox([self.chart, self.log], layout=w.Layout(flex_flow="row wrap")), controls])
        self.handle = display(self.box, display_id=True)

    def _press(self, button):
        """The page may call this from another thread: only leave a note, the cell's own loop acts on it."""
        self.cancel_pressed = True
        button.disabled, button.description = True, "Cancelling"

    def paint(self, moment):
        """Show a moment."""
        self.head.value, self.chart.value, self.log.value = moment.head(), moment.chart(), moment.tail()
        self.bar.layout.visibility = "visible" if moment.total else "hidden"
        if moment.total and moment.steps:
            self.bar.value = moment.steps[-1]["step"] / moment.total

    def replace(self, moment):
        """Put picture and line in the widget's place; keep the end of the log where the job did not end well."""
        self.handle.update(moment.bundle())
        if moment.state != "done":
            display(HTML(moment.head() + moment.tail()))
        for widget in [self.box, *self.box.children, *self.parts]:
            widget.close()
