"""The live view of a job: ``await job`` in a cell.

In JupyterLab it shows a widget until the job has ended; then a picture and a line of text replace it, and are what a
saved notebook keeps. Without one (a test, nbconvert) it waits, and displays the same picture and line once.

It is awaited because the kernel handles the page's messages while a cell awaits: the Cancel button and the interrupt
button work, and the cells below do not start early. Cancel ends the job. The interrupt leaves it running and only ends
the wait, because a page that was reloaded has lost its view, and the kernel runs no other cell before that.
"""

import asyncio
from collections.abc import Generator
from typing import Any

from IPython.display import display

from mpdemo.errors import UserError
from mpdemo.front_end import has_front_end
from mpdemo.jobs import Job
from mpdemo.notebook.job_widget import JobWidget, picture_of, view_of

BELOW = "The cells below were not run."


class JobCancelled(UserError):
    """A job was cancelled from its view; raised so that the cells below do not run."""


class Detached(UserError):
    """The interrupt button was pressed, and the job runs on; raised so that the cells below do not run."""


class Run(Job):
    """A job that a cell has started: awaited, it shows itself until it has ended. An interrupt says one line."""

    def __await__(self) -> Generator[Any, None, None]:
        return follow(self).__await__()

    def wait(self, *limits: float, **words: float) -> str:
        """Wait as any job does; an interrupt leaves it running, and says so."""
        try:
            return super().wait(*limits, **words)
        except KeyboardInterrupt:
            raise Detached(f"{detached(self)} {BELOW}") from None

    def output(self, fails: bool = False) -> str:
        """Return what any job does; an interrupt ends the job, and says so."""
        try:
            return super().output(fails)
        except Detached:
            said = f"job {self.id} ({self.name}) was interrupted, which ended it. Run the cell again to start it anew."
            raise JobCancelled(f"{said} {BELOW}") from None


async def follow(job: Job, timeout: float = 3600.0) -> None:
    """Show a job until it has ended: live in JupyterLab and the like (`has_front_end`), else at its end.

    A cell that is run again after the page was reloaded finds its job (interrupt the kernel first); the page of a saved
    and trusted notebook shows the view again by itself. The job may run for `timeout` seconds (and wait a day in the
    queue) where there is no widget, which waits without limit.

    Raises
    ------
    JobCancelled
        The Cancel button was pressed, which ends the job.
    Detached
        The interrupt button was pressed. The job continues.
    TimeoutError
        The job still waits or runs after `timeout`. It continues.
    """
    widget = JobWidget(job) if has_front_end() else None
    interrupted = False
    try:
        await (widget.until_finished() if widget else _until_finished(job, timeout))
    except (KeyboardInterrupt, asyncio.CancelledError):
        interrupted = True
    view = await view_of(job)
    if widget:
        widget.replace(view)
    else:
        display(picture_of(view))
    if interrupted:
        left = f"{view.line}." if view.finished else detached(job)
        raise Detached(f"{left} {BELOW}")
    if widget and widget.cancelling:
        raise JobCancelled(f"{view.name} was cancelled ({view.state}); the cells below were not run")


async def _until_finished(job: Job, timeout: float) -> None:
    """Wait for the end of a job for a limited time; an interrupt leaves no thread that still waits."""
    looks = job.waiting(timeout)
    while await asyncio.to_thread(next, looks, "ended") != "ended":  # Slurm may be slow
        await asyncio.sleep(0.1)


def detached(job) -> str:
    """Return what an interrupt says of a job that it has left running: how to follow it again, and how to end it."""
    number, _, cluster = job.id.partition(";")
    end = f"scancel --clusters={cluster} {number}" if cluster else f"scancel {number}"
    if not job.record.get("identity"):
        end = f"kill {number}; it also ends with the kernel that started it"
    return (
        f"job {number} ({job.name}) is still {job.state} on {job.where}. "
        f"Run the cell again to follow it. Cancel it: {end}."
    )
