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

from IPython import get_ipython
from IPython.display import display

from mpdemo.errors import UserError
from mpdemo.jobs import attach
from mpdemo.jobs.times import DAY, Deadline
from mpdemo.notebook.job_widget import JobWidget
from mpdemo.notebook.snapshot import Snapshot, together

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
        Seconds that a job may run where there is no front end; time in the queue does not count (a day at most).
        The live view waits without limit.

    Raises
    ------
    JobCancelled
        The Cancel button or the interrupt button was pressed: of the job in detail, or of all. They have been
        cancelled.
    TimeoutError
        A job still waits or runs after `timeout`. It continues.
    """
    if not jobs:
        raise UserError('nothing to follow; give a job, or the folder of a run: await follow("runs/03_ddp")')
    jobs = [attach(job) if isinstance(job, str | Path) else job for job in jobs]
    view = JobWidget(jobs) if (has_front_end() if live is None else live) else None
    try:
        cancelled = await _until_finished(jobs, view, None if view else [Deadline(timeout, DAY) for _ in jobs])
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


async def _until_finished(jobs, view, deadlines) -> list:
    """Wait for the end of all jobs, without a view until their deadlines; return those that the view has cancelled."""
    cancelled = []
    while True:
        begin = time.monotonic()
        snapshots = await _read(jobs, view)
        if snapshots is None:
            cancelled.append(jobs[view.taken()])
            with suppress(UserError):  # Slurm does not answer: the job's line says so, and the others go on
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
    """Read the jobs' files and ask Slurm, in a thread: a slow answer keeps neither kernel nor Cancel button waiting.

    Returns None once the button was pressed.
    """
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
