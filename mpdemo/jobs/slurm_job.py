"""A job that Slurm runs."""

import dataclasses
import math
from functools import cached_property
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import diagnose, queue, slurm
from mpdemo.jobs.job import Job
from mpdemo.jobs.record import read_record, read_text, write_record
from mpdemo.jobs.slurm_answers import Answer


class SlurmJob(Job):
    """A job submitted with sbatch. See `mpdemo.jobs.job.Job`."""

    patience = 0.5  # between two looks at the user's listing, which asks Slurm once per polling interval

    @property
    def log_files(self) -> list[Path]:
        files = [self.out / f"slurm-{self.id}.out", self.out / f"slurm-{self.id}.err"]
        return [file for file in files if file.exists()]

    @property
    def polling_seconds(self) -> float:
        """The site's polling interval."""
        return self.record.get("polling_seconds", 5.0)

    @property
    def queue(self) -> int | None:
        waits = self.state == "pending"
        return queue.listing(self.record["identity"], self.polling_seconds).position(self.id) if waits else None

    def cancel(self):
        if self.finished:
            return
        slurm.client("scancel", self.id)
        queue.forget(self.record["identity"])
        self._seen = None
        if "_" in self.id and slurm.ask(self.id) is None:  # Slurm forgets an array's element at once that never ran
            self._keep(Answer("cancelled"))

    def warn(self):
        if self.state != "running":
            raise UserError(f"job {self.id} ({self.name}) is {self.state}; only a running job can be warned")
        script = read_text(paths.root() / self.script)
        if "torch.distributed.run" in script and "SIGUSR1" not in script:
            raise UserError(f'torchrun passes no warning on in job {self.id}; do: JobSpec(..., signal="USR1@60")')
        slurm.client("scancel", "--signal=USR1", self.id)  # to the processes that srun started

    @cached_property
    def _cluster_in_reach(self) -> bool:
        """Whether the cluster in reach is the job's own: another one may have a job of the same number. Asked once."""
        return slurm.in_reach() and slurm.identity() == self.record["identity"]

    def _ask(self):
        """Ask the controller, then accounting; then the record of an earlier answer, the log, the script's marker."""
        if "final" in self.record:
            return Answer(**self.record["final"])
        try:
            answer = self._ask_slurm() if self._cluster_in_reach else None
        except slurm.NoAnswer:
            return self._last_seen()
        answer = self._refine(answer) if answer else self.answer_from_files()
        if answer.state not in ("pending", "running", "unknown"):
            self._keep(answer)
        return answer

    def _keep(self, answer):
        """Write down how the job ended."""
        self.record["final"] = vars(answer)
        if (read_record(self.out) or {}).get("id") == self.record["id"]:  # the folder may have a newer job by now
            write_record(self.out, self.record)

    def _ask_slurm(self):
        """Look the job up among the user's jobs; one that neither waits nor runs is asked for, once."""
        listing = queue.listing(self.record["identity"], self.polling_seconds)
        if listing.silence:
            raise slurm.NoAnswer("squeue")
        return listing.answer(self.id) or slurm.ask(self.id)

    def _last_seen(self):
        """Slurm's silence is no end of a job: what it said last holds on."""
        listing = queue.listing(self.record["identity"], interval=math.inf)
        answer = listing.answer(self.id)
        seen = f", last seen {answer.state} {listing.silence:.0f} s ago" if answer else ""
        return dataclasses.replace(answer or Answer("pending"), reason=f"Slurm does not answer{seen}")

    def _refine(self, answer):
        """Slurm's FAILED covers three ends that mean different things to a learner."""
        if answer.state == "failed" and diagnose.stopped_with_checkpoint(self.log(), answer.exit_status):
            return dataclasses.replace(answer, state="stopped")
        if answer.state == "failed" and diagnose.out_of_memory(self.log()):
            return dataclasses.replace(answer, state="out_of_memory")
        return answer

    def answer_from_files(self) -> Answer:
        """Return what log and script's marker say, once Slurm has forgotten the job. Absence is not success."""
        log = self.log()
        state = diagnose.state_by_slurm(log)
        if state:
            return Answer(state, "from the job's log; Slurm has forgotten it")
        marker = read_text(self.out / "exit-status.txt").split()
        if len(marker) == 2 and marker[0] == self.id:
            state = diagnose.state_by_status(log, int(marker[1]))
            return Answer(state, "from the script's marker; Slurm has forgotten the job", int(marker[1]))
        return Answer("unknown", "Slurm has forgotten the job, and its script left no marker")


def start(script, identity, options) -> dict:
    """Submit a script from the project's root with more options; return what the job's record holds of it."""
    job_id = slurm.sbatch(script, paths.root(), *options)
    queue.forget(identity)
    return {"id": job_id, "where": f"cluster {identity.split()[0]}", "identity": identity}
