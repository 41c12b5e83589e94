"""How long to wait for a job: its time in the queue does not count as its run."""

import math
import time

DAY = 86400.0  # seconds


class Deadline:
    """The bounds of a wait for a job, in seconds: of its time in the queue, and of its run, counted from its start."""

    def __init__(self, timeout, pending):
        self.limits = {"pending": pending, "running": timeout}
        self.state = None

    def check(self, job):
        """Raise TimeoutError where the job has waited or run for too long; a requeued job begins anew."""
        if job.state != self.state:
            self.state, self.begin = job.state, time.monotonic()
        limit = self.limits.get(self.state, math.inf)
        if time.monotonic() - self.begin > limit:
            reason = f" ({job.reason})" if job.reason else ""
            again = f'follow it again: await follow("{job.out.as_posix()}")'
            raise TimeoutError(f"job {job.id} ({job.name}) is still {job.state}{reason} after {limit:g} s; {again}")
