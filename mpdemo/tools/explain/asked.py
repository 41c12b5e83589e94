"""Which job or log `explain` was asked for: by a file, by the folder of a run, or by the number of a job."""

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mpdemo import foreign, paths
from mpdemo.errors import UserError
from mpdemo.jobs import slurm, slurm_job
from mpdemo.jobs.job import RECORD, Job, read_record
from mpdemo.tools.explain.reading import UTF16

BEGIN = 2**16  # bytes by which text is recognised
NULS = re.compile(rb"\0{16,}")
MOST_BYTES = 64 * 2**20  # of a log that are read: of a larger one, its end
MOST_LINES = 2**22


@dataclass(frozen=True)
class Asked:
    """What was asked for: a log alone (without a name), or a job with what is known of it."""

    logs: list
    name: str = ""
    answer: slurm.Answer = slurm.Answer("")
    folder: Path | None = None  # of the run
    slurm_id: str = ""  # of a job of the Slurm found here
    resumes: bool = False
    piped: tuple | None = None  # the end of a log that came from standard input, and whether there was more

    @property
    def headline(self) -> str:
        """The job, its state and its end."""
        return f"{self.name}: {self.answer}, after {self.answer.run_time:.0f} s"

    @property
    def silence(self) -> float:
        """For how long nothing was written, in s: neither to the log nor to the metrics."""
        files = [*self.logs, *(self.folder.glob("metrics.jsonl") if self.folder else ())]
        return time.time() - max((file.stat().st_mtime for file in files), default=0)

    def last_bytes(self) -> tuple[bytes, bool]:
        """Return the end of its log, and whether something was left out."""
        found = [self.piped] if self.piped else [foreign.tail(log, MOST_BYTES) for log in self.logs]
        text, cut = b"".join(text for text, _ in found), any(cut for _, cut in found)
        while text.count(b"\n") > MOST_LINES:
            text, cut = text[len(text) // 2 :], True
        return text, cut


def resolve(what) -> Asked:
    """Return what is known of a log, of a run's folder or of a job's number."""
    if what == "-":
        piped, cut = sys.stdin.buffer.read(MOST_BYTES), False
        refuse(piped[:BEGIN], "what comes from standard input")
        while more := sys.stdin.buffer.read(MOST_BYTES):
            piped, cut = (piped + more)[-MOST_BYTES:], True
        return Asked([], piped=(piped, cut))
    if os.path.isfile(what):  # a pipe would wait forever
        with foreign.opened(what) as file:
            refuse(file.read(BEGIN), what)
        return Asked([Path(what)])
    if folder := next(
        (path for path in (Path(what).absolute(), paths.root() / what) if os.path.isdir(path)), None
    ):
        if record := read_record(folder):
            return of_job(Job(record, folder, reads=True))
        found = (
            path
            for pattern in ("slurm-*.out", "*log*.txt")
            for path in folder.glob(pattern)
            if path.is_file()
        )
        logs = sorted(found, key=os.path.getmtime)
        if not logs:
            raise UserError(f"{what} holds no job and no log (slurm-*.out, log.txt); give a log file")
        return Asked(logs[-1:], folder=folder)
    if re.fullmatch(r"\d+(_\d+)?(;[\w-]+)?", what):
        return of_number(what)
    raise UserError(f"{what} is no log file, no folder of a run and no number of a job")


def refuse(data, what):
    """Refuse the beginning of a file that is empty or no text; a block of NULs is left where a node crashed."""
    if not data:
        raise UserError(f"{what} is empty; give a job's log, such as slurm-7.out (or -: standard input)")
    if b"\0" in NULS.sub(b"", data) and data[:2] not in UTF16:
        raise UserError(f"{what} is not text; give a job's log file")


def of_job(job) -> Asked:
    """Return what is known of a job that was submitted by this package."""
    spec, identity = job.record["spec"], job.record.get("identity")
    return Asked(
        job.log_files,
        job.title,
        job.answer,
        job.out,
        slurm_id=job.id if identity and slurm.in_reach() and slurm.identity() == identity else "",
        resumes=any(str(word).startswith("--resume") for word in spec.get("command", ())),
    )


def of_number(number) -> Asked:
    """Return what is known of a job by its number: one of a folder in runs/, or any that Slurm knows."""
    identity, runs = slurm.identity() if slurm.in_reach() else None, paths.root() / "runs"
    files = [*runs.glob(f"*/{RECORD}"), *runs.glob(f"*/*/{RECORD}")]
    records, damaged = [], []
    for file in files:
        try:
            records.append((read_record(file.parent), file.parent))
        except UserError as error:  # of another run, perhaps
            damaged.append(error)
    ours = [(record, out) for record, out in records if str(record["id"]) == number]
    here = [(record, out) for record, out in ours if record.get("identity") in (identity, None)]
    if here:
        return of_job(Job(*max(here, key=lambda pair: pair[0].get("submitted", 0)), reads=True))
    answer = slurm_job.look_up(number) if identity else None
    if answer:
        return of_slurm(number, answer)
    if damaged:
        raise damaged[0]
    if identity is None:
        raise UserError(f"{slurm.none_in_reach()}, and no run in {runs} has job {number}; give its log")
    raise UserError(f"Slurm knows no job {number} (any more); give its log")


def of_slurm(number, answer) -> Asked:
    """Return what Slurm tells of a job of any user's script."""
    try:
        shown = slurm.client("scontrol", "show", "job", number)
    except slurm.SlurmError:  # accounting alone still knows it
        shown = ""
    fields = dict(re.findall(r"^ *(StdOut|StdErr)=(.*)$", shown, re.MULTILINE))
    places = [Path(fields[name]) for name in ("StdOut", "StdErr") if name in fields]
    places += [folder / f"slurm-{slurm.number(number)}.out" for folder in (Path.cwd(), paths.root())]
    logs = list(dict.fromkeys(place for place in places if place.is_file()))[:2]
    if answer.state == "failed":
        text = b"".join(foreign.tail(log, slurm.ENOUGH)[0] for log in logs).decode(errors="replace")
        answer = answer._replace(state=slurm.state_by_status(text, 1))
    name = next(iter(re.findall(r"JobName=(.*)", shown)), "?")
    headline = f"job {number} ({name}) on cluster {slurm.cluster_name()}"
    return Asked(logs, headline, answer, slurm_id=number)
