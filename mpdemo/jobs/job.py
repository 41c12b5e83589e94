"""One Job class, whether Slurm runs it (`mpdemo.jobs.slurm_job`) or this machine (`mpdemo.jobs.local_job`)."""

import json
import sys
import time
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.jobs import diagnose, local_job, slurm_job
from mpdemo.jobs.record import read_text
from mpdemo.jobs.times import DAY, Deadline
from mpdemo.training.log import read_rows

FINISHED = ("done", "failed", "stopped", "cancelled", "timeout", "out_of_memory", "node_failure", "unknown")
HERE = "this machine"  # where a job runs that Slurm does not know
SAY_AFTER = 30.0  # seconds in the queue, after which `wait` prints that the job waits


class JobFailed(RuntimeError):
    """A job did not end well: names the process, its exit status and its last output.

    Attributes
    ----------
    job : Job
    failure : mpdemo.jobs.diagnose.Failure
    """

    def __init__(self, message, job, failure):
        super().__init__(message)
        self.job, self.failure = job, failure


class Job:
    """A submitted job. Made by `mpdemo.jobs.submit` or `mpdemo.jobs.attach`.

    Attributes
    ----------
    id : str
        Slurm's number, or this machine's process number.
    where : str
        ``"this machine"``, ``"cluster NAME"``, or ``"job NUMBER"``: a step of the job that runs the notebook.
    out : Path
        The run's folder.
    script : Path
        The sbatch file, relative to the project's root.
    polling_seconds : float
        How often Slurm is asked about it, at most.
    """

    def __init__(self, record, out):
        self.record = record
        self.id = str(record["id"])
        self.where = record["where"]
        self.name = record["spec"]["name"]
        self.out = Path(out)
        self.script = Path(record["script"])
        self.polling_seconds = record.get("polling_seconds", 5.0)
        self.own_cluster = None  # whether the cluster in reach is the job's own; not known yet
        self._back_end = slurm_job if record.get("identity") else local_job
        self._seen = None  # the last answer
        self._seen_at = 0.0  # when it was given

    def __repr__(self):
        return f"<Job {self.id} {self.name!r} on {self.where}: {self.state}>"

    @property
    def _answer(self):
        """The newest answer; the back end is asked at most once per PATIENCE, and never again after the end."""
        seen = self._seen
        if seen is None or (seen.state not in FINISHED and time.monotonic() - self._seen_at >= self._back_end.PATIENCE):
            self._seen, self._seen_at = self._back_end.ask(self), time.monotonic()
        return self._seen

    @property
    def state(self) -> str:
        """pending, running, done, failed, stopped (with a checkpoint), cancelled, timeout, out_of_memory,
        node_failure or unknown."""
        return self._answer.state

    @property
    def reason(self) -> str:
        """Why it waits or how it ended, as Slurm reports it where there is one."""
        return self._answer.reason

    @property
    def run_time(self) -> float:
        """Seconds since the start (until the end)."""
        return self._answer.run_time

    @property
    def exit_status(self) -> int | None:
        """The job's exit status; None while it runs, or where nobody knows it."""
        return self._answer.exit_status if self.finished else None

    @property
    def finished(self) -> bool:
        """Whether the state will not change any more."""
        return self.state in FINISHED

    @property
    def queue(self) -> int | None:
        """Place in the queue, 1 for the next; None for a job that does not wait."""
        return slurm_job.place(self) if self.state == "pending" else None

    @property
    def log_files(self) -> list[Path]:
        """The files that hold what the job prints."""
        return self._back_end.log_files(self)

    def log(self) -> str:
        """What the job has printed so far (a separate file of errors comes last)."""
        return "".join(read_text(file) for file in self.log_files)

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl so far; a line that is half written waits for the next call."""
        return read_rows(read_text(self.out / "metrics.jsonl").rpartition("\n")[0])

    def cancel(self):
        """End the job; its state becomes ``cancelled``. A finished job stays as it is."""
        if not self.finished:
            self._back_end.cancel(self)
            self._seen = None

    def warn(self):
        """Send SIGUSR1 to the job's processes now, as Slurm does before the time limit of a job with ``signal``.

        A training then stops with a checkpoint. Taught in notebooks/09_checkpoint.ipynb.

        Raises
        ------
        UserError
            The job does not run.
        """
        if self.state != "running":
            raise UserError(f"job {self.id} ({self.name}) is {self.state}; only a running job can be warned")
        self._back_end.warn(self)

    def wait(self, timeout=600.0, pending=DAY) -> str:
        """Wait for the end and return the final state.

        Parameters
        ----------
        timeout : float
            The longest time that the job may run meanwhile, in seconds. Time in the queue does not count.
        pending : float
            The longest time in the queue, in seconds.

        Raises
        ------
        TimeoutError
            The job has not ended by then; it runs on.
        """
        deadline, said = Deadline(timeout, pending), False
        while not self.finished:
            deadline.check(self)
            if self.state == "pending" and not said and time.monotonic() - deadline.begin > SAY_AFTER:
                print(f"job {self.id} ({self.name}) waits in the queue ({self.reason})", file=sys.stderr)
                said = True
            time.sleep(0.1)
        return self.state

    def failure(self) -> diagnose.Failure | None:
        """The process to blame and its last output; None unless the job failed."""
        if not self.finished or self.state == "done":
            return None
        return diagnose.failure(self.log(), self.exit_status)

    def result(self, timeout=600.0) -> dict:
        """Wait for the end and return the run's summary.json.

        Raises
        ------
        JobFailed
            The job ended otherwise: with the rank, its exit status and its last output.
        TimeoutError
            It has not ended within `timeout` seconds.
        """
        state = self.wait(timeout)
        if state != "done":
            failure = self.failure()
            ends = {"failed": str(failure), "stopped": "stopped early, with a checkpoint"}
            ends |= {"out_of_memory": diagnose.cause("oom_kill event")}
            reason = f" ({self.reason})" if self.reason and state != "failed" else ""
            tail = "\n".join(f"  {line}" for line in failure.lines)
            where = f"job {self.id} ({self.name}) on {self.where}"
            raise JobFailed(f"{where}: {ends.get(state, state)}{reason}\n{tail}", self, failure)
        file = self.out / "summary.json"
        if not file.exists():
            raise JobFailed(f"job {self.id} ({self.name}) is done but wrote no {file.name} in its folder", self, None)
        return json.loads(file.read_text())
