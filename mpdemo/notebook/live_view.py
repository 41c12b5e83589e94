"""The live view of a job, or of several: ``await follow(job)`` in a cell.

In JupyterLab it shows a widget until all jobs have ended; then a picture and a line of text replace it, and are what
a saved notebook keeps. Without one (a test, nbconvert) it waits, and displays the same picture and line once.

It is awaited because the kernel handles the page's messages while a cell awaits: the Cancel button and the interrupt
button work, and the cells below do not start early. Cancel ends the job. The interrupt leaves it running and only ends
the wait, because a page that was reloaded has lost its view, and the kernel runs no other cell before that.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from IPython.display import display

from mpdemo.errors import UserError
from mpdemo.jobs import Job, attach
from mpdemo.jobs.follow import detached
from mpdemo.notebook.job_widget import JobWidget, together, views_of
from mpdemo.waits import has_front_end


class JobCancelled(UserError):
    """A job was cancelled from its view; raised so that the cells below do not run."""


class Detached(UserError):
    """The interrupt button was pressed, and the jobs run on; raised so that the cells below do not run."""


async def follow(*jobs: Job | str | Path, timeout: float = 3600.0) -> None:
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
    followed = [attach(job) if isinstance(job, str | Path) else job for job in jobs]
    widget = JobWidget(followed) if has_front_end() else None
    interrupted = False
    try:
        await (widget.until_finished() if widget else _until_finished(followed, timeout))
    except (KeyboardInterrupt, asyncio.CancelledError):
        interrupted = True
    views = await views_of(followed)
    if widget:
        widget.replace(views)
    else:
        display(together(views))
    if interrupted:
        left = [f"{view.line}." if view.finished else detached(job) for view, job in zip(views, followed, strict=True)]
        raise Detached(" ".join([*left, "The cells below were not run."]))
    if widget and widget.cancelled:
        ended = [view for view, job in zip(views, followed, strict=True) if job in widget.cancelled]
        names = ", ".join(f"{view.name} was cancelled ({view.state})" for view in ended)
        raise JobCancelled(f"{names}; the cells below were not run")


async def _until_finished(jobs: Sequence[Job], timeout: float) -> None:
    """Wait for the end of all jobs for a limited time; an interrupt leaves no thread that still waits."""
    for job in jobs:
        looks = job.waiting(timeout)
        while await asyncio.to_thread(next, looks, "ended") != "ended":  # Slurm may be slow
            await asyncio.sleep(0.1)
