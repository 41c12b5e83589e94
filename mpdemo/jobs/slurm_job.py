"""A job in Slurm's hands."""

import time
from functools import cached_property
from pathlib import Path

from mpdemo import paths
from mpdemo.jobs import diagnose, slurm
from mpdemo.jobs.answers import Answer
from mpdemo.jobs.job import Job, read_record, read_text, write_record


class SlurmJob(Job):
    """A job that sbatch took. See `mpdemo.jobs.job.Job`."""

    @property
    def log_files(self) -> list[Path]:
        files = [self.out / f"slurm-{self.id}.out", self.out / f"slurm-{self.id}.err"]
        return [file for file in files if file.exists()]

    @property
    def queue(self) -> int | None:
        return slurm.queue_position(self.id) if self.state == "pending" else None

    def cancel(self):
        if not self.finished:
            slurm.scancel(self.id)
            self._seen = None

    @cached_property
    def _cluster_in_reach(self) -> bool:
        """Whether the cluster in reach is the job's own: another one may have a job of the same number. Asked once."""
        return slurm.in_reach() and slurm.identity() == self.record["identity"]

    def _ask(self):
        """Ask the controller, then accounting; then the record of a former answer, the log, the script's marker."""
        kept = self.record.get("final")
        if kept:
            return Answer(**kept)
        answer = slurm.ask(self.id) if self._cluster_in_reach else None
        answer = self._refine(answer) if answer else self._from_files()
        if answer.state not in ("pending", "running", "unknown"):
            self.record["final"] = vars(answer)
            if (read_record(self.out) or {}).get("id") == self.record["id"]:  # the folder may have a newer job by now
                write_record(self.out, self.record)
        return answer

    def _refine(self, answer):
        """Slurm's FAILED covers three ends that mean different things to a learner."""
        if answer.state != "failed":
            return answer
        log = self.log()
        state = answer.state
        if diagnose.stopped_with_checkpoint(log, answer.exit_status):
            state = "stopped"
        elif diagnose.out_of_memory(log):
            state = "out_of_memory"
        return Answer(state, answer.reason, answer.exit_status, answer.run_time)

    def _from_files(self):
        """Slurm has forgotten the job: what its own log and its script's marker tell. Absence is not success."""
        log = self.log()
        verdict = diagnose.slurm_verdict(log)
        if verdict:
            return Answer(verdict, "from the job's log; Slurm has forgotten it")
        words = read_text(self.out / "exit-status.txt").split()
        if len(words) == 2 and words[0] == self.id:
            status = int(words[1])
            state = "done" if status == 0 else "stopped" if diagnose.stopped_with_checkpoint(log, status) else "failed"
            return Answer(state, "from the script's marker; Slurm has forgotten the job", status)
        return Answer("unknown", "Slurm has forgotten the job, and its script left no marker")


def start(spec, script, cluster, identity) -> dict:
    """Submit a script from the project's root; return the job's record."""
    job_id = slurm.sbatch(script, paths.root())
    return {
        "id": job_id,
        "where": f"cluster {cluster}",
        "identity": identity,
        "script": str(script),
        "spec": spec.as_dict(),
        "submitted": time.time(),
    }
