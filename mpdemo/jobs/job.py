"""One Job class, whether Slurm runs it (`mpdemo.jobs.slurm_job`) or this machine (`mpdemo.jobs.local_job`)."""

import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from mpdemo import foreign, paths
from mpdemo.errors import UserError, one_line, printable
from mpdemo.front_end import waiting_for
from mpdemo.jobs import local_job, slurm_job
from mpdemo.jobs.slurm import Answer
from mpdemo.training.log import rows_in

FINISHED = ("done", "failed", "stopped", "cancelled", "timeout", "out_of_memory", "node_failure", "unknown")
FIELDS = {  # of a record, beside those that it always has
    "identity": str | None,
    "started": int | float | None,
    "submitted": float,
    "polling_seconds": float,
    "host": str,
    "programs": dict | None,
    "final": dict,
}
ANSWER = {"state": str, "reason": str, "exit_status": int | None, "run_time": float}
LAST_LINES = 12  # of a failed job's log
TORCHRUN = "failed (exitcode: "  # with which it begins its report
LABEL = re.compile(r"^(?:\s*\d+: )+")  # of srun --label
RECORD = "job.json"  # in the run's folder: which job it has
# a process here, or a job of Slurm, perhaps in an array or elsewhere
ID = re.compile(r"\d{1,10}(_\d+)?(;[\w-]+)?")
LONGEST = 2**30  # bytes of a log that are read, at its end
SAY_AFTER = 30.0  # seconds in the queue, after which `wait` prints that the job waits
DAY = 86400.0  # seconds


class JobFailed(RuntimeError):
    """A job did not end well: says how, where its log is, and its last lines."""


class Job:
    """A submitted job, made by `mpdemo.jobs.submit`.

    `id` is Slurm's number, or this machine's process number; `where` is ``"this machine"`` or ``"cluster NAME"``;
    `out` is the run's folder, and `script` the batch script, relative to the project's root. Slurm is asked at most
    once in `polling_seconds`. One that only `reads` writes nothing into the run's folder.
    """

    def __init__(self, record: dict[str, Any], out: str | Path, reads: bool = False) -> None:
        self.record, self.reads = record, reads
        self.id = str(record["id"])
        self.where, self.name = one_line(record["where"]), one_line(record["spec"]["name"])
        self.out = Path(out)
        self.script = Path(record["script"])
        self.polling_seconds = record.get("polling_seconds", 5.0)
        # whether the cluster found here is the job's own; not known yet
        self.own_cluster: bool | None = None
        self._back_end = slurm_job if record.get("identity") else local_job
        self._seen: Answer | None = None  # the last answer
        self._seen_at = -math.inf  # when it was given

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name!r} on {self.where}: {self.state}>"

    @property
    def title(self) -> str:
        """Its number, name and place, in words."""
        return f"job {self.id} ({self.name}) on {self.where}"

    @property
    def answer(self) -> Answer:
        """State, reason, exit status and run time, as its back end gave them: asked at most once per PATIENCE."""
        answer = self._seen
        is_fresh = time.monotonic() - self._seen_at < self._back_end.PATIENCE
        if answer is not None and (is_fresh or answer.state in FINISHED):
            return answer
        self._seen = answer = self._back_end.ask(self)
        self._seen_at = time.monotonic()
        return answer

    @property
    def state(self) -> str:
        """pending, running, done, failed, stopped (with a checkpoint), cancelled, timeout, out_of_memory,
        node_failure or unknown."""
        return self.answer.state

    @property
    def reason(self) -> str:
        """Why it waits or how it ended, as Slurm reports it where there is one."""
        return self.answer.reason

    @property
    def run_time(self) -> float:
        """Seconds since the start (until the end)."""
        return self.answer.run_time

    @property
    def exit_status(self) -> int | None:
        """The job's exit status; None while it runs, or where it is unknown."""
        return self.answer.exit_status if self.finished else None

    @property
    def finished(self) -> bool:
        """Whether the state will not change any more."""
        return self.state in FINISHED

    @property
    def queue(self) -> int | None:
        """Place in the queue, 1 for the next; None for a job that does not wait."""
        return slurm_job.position(self) if self.state == "pending" else None

    @property
    def log_files(self) -> list[Path]:
        """The files that hold what the job prints."""
        return [file for file in self._back_end.log_files(self) if file.is_file()]

    def log(self, most: int = LONGEST) -> str:
        """What the job has printed so far, of each file so many bytes at its end; a file of errors comes last."""
        return "".join(foreign.tail(file, most)[0].decode(errors="replace") for file in self.log_files)

    def output(self, fails: bool = False) -> str:
        """Wait for the end and return what the job printed, without the labels and notes of its launcher.

        `JobFailed` if it failed, unless `fails` says that it may. An interrupt ends the job, as in a terminal.
        """
        try:
            state = self.wait()
        finally:
            self.cancel()  # one that has ended stays as it is
        if state != "done" and not fails:
            raise JobFailed(self.failure())
        lines = (LABEL.sub("", line) for line in self.log().splitlines())
        lines = (line for line in lines if not line.startswith("srun:") and "socket.cpp" not in line)
        return "\n".join(lines).strip()

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far; a line that is half written waits for the next call."""
        return rows_in(self.out)

    def cancel(self) -> None:
        """End the job; its state becomes ``cancelled``. A finished job stays as it is."""
        if not self.finished:
            self._back_end.cancel(self)
            self._seen_at = -math.inf

    def warn(self) -> None:
        """Send SIGUSR1 to the job's processes now, as Slurm does before the time limit of a job with ``signal``.

        A program that listens saves and stops then. `UserError` where the job does not run. Taught in notebook 53.
        """
        if self.state != "running":
            raise UserError(
                f"job {self.id} ({self.name}) is {self.state}; only a running job can be warned"
            )
        self._back_end.warn(self)

    @property
    def folder(self) -> str:
        """The run's folder, relative to the project's root if it lies below it."""
        below = self.out.is_relative_to(paths.root())
        return (self.out.relative_to(paths.root()) if below else self.out).as_posix()

    def wait(self, timeout: float = 600.0, pending: float = DAY) -> str:
        """Wait for the end and return the final state.

        It may run for `timeout` seconds meanwhile, after at most `pending` seconds in the queue; then `TimeoutError` is
        raised, and the job runs on.
        """
        with waiting_for(self.in_words):
            for _ in self.waiting(timeout, pending):
                time.sleep(0.1)
        return self.state

    def in_words(self) -> str:
        """Return the run's folder, the last known state and the processes, for a line that says what is waited for."""
        spec = self.record["spec"]
        state = self._seen.state if self._seen else "submitted"
        count = spec.get("nodes", 1) * spec.get("processes_per_node", 1)
        return f"{self.folder} ({state}, {count} process{'es' if count > 1 else ''})"

    def waiting(self, timeout: float, pending: float = DAY) -> Generator[None]:
        """Yield until the job has ended, for a caller who has something to do between two looks; else as `wait`."""
        limits = {"pending": pending, "running": timeout}
        state, begin, said = "", 0.0, False
        while not self.finished:
            if self.state != state:  # a requeued job begins anew
                state, begin = self.state, time.monotonic()
            limit = limits.get(state, math.inf)
            if time.monotonic() - begin > limit:
                raise TimeoutError(
                    f"job {self.id} ({self.name}) is still {self.answer} after {limit:g} s; it runs on"
                )
            if state == "pending" and time.monotonic() - begin > SAY_AFTER and not said:
                print(f"job {self.id} ({self.name}) waits in the queue: {self.answer}", file=sys.stderr)
                said = True
            yield

    def result(self, timeout: float = 600.0) -> dict[str, Any]:
        """Wait for the end, as `wait` does, and return the run's summary.json; `JobFailed` if it ended otherwise."""
        state = self.wait(timeout)
        file = self.out / "summary.json"
        if state == "done" and file.exists():
            with foreign.faults(f"{file} is damaged"):
                return foreign.unpacked(file)
        if state == "done":
            raise JobFailed(f"{self.title} is done but wrote no {file.name} in its folder")
        raise JobFailed(self.failure())

    def failure(self) -> str:
        """Return how the job ended, where its log is, the log's last lines, and what to ask."""
        files = ", ".join(map(str, self.log_files)) or "none"
        lines = self.log().splitlines()
        # its box says no more
        end = next((k for k, line in enumerate(lines, 1) if TORCHRUN in line), len(lines))
        said = "\n".join(lines[:end][-LAST_LINES:])
        ask = f"what it may be: mpdemo explain {self.folder}"
        return printable(f"{self.title}: {self.answer}; log: {files}\nits last lines:\n{said}\n{ask}")

    def remember(self, answer: Answer) -> None:
        """Write down the last answer for the day when Slurm has forgotten the job, if the folder still has it."""
        if self.reads:
            return
        self.record["final"] = answer._asdict()
        with contextlib.suppress(OSError):  # a full disk: Slurm is asked again
            if (read_record(self.out) or {}).get("id") == self.record["id"]:
                write_record(self.out, self.record)


def write_record(out: str | Path, record: dict[str, Any]) -> None:
    """Write job.json in one step, so that half of it is never read."""
    part = Path(out, f"{RECORD}.part")
    part.unlink(missing_ok=True)
    with part.open("x") as file:  # a link would lead elsewhere
        file.write(json.dumps(record, indent=1) + "\n")
    part.replace(Path(out, RECORD))


def read_record(out: str | Path) -> dict[str, Any] | None:
    """Read a run folder's job.json; None if there is none; `UserError` if it is damaged."""
    file = Path(out, RECORD)
    if not file.exists():
        return None
    with foreign.faults(f"{file} is damaged", "do: remove it, and submit again"):
        record = foreign.unpacked(file)
        foreign.typed(record, **FIELDS, id=int | str, where=str, script=str)["where"], record["script"]
        foreign.typed(record["spec"], name=str, command=list, nodes=int, processes_per_node=int)["name"]
        if not ID.fullmatch(str(record["id"])) or not (
            record.get("identity") or str(record["id"]).isdecimal()
        ):
            raise ValueError(f"id can't be {record['id']!r}")
        if "final" in record:
            record["final"] = foreign.typed(record["final"], **ANSWER)
            if Answer(**record["final"]).state not in FINISHED:
                raise ValueError(f"no job ends as {record['final']['state']!r}")
    return record
