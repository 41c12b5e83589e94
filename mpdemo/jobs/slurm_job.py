"""How `mpdemo.jobs.job.Job` asks, cancels and warns a job that Slurm runs, and how one is submitted."""

import math
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import diagnose, queue, slurm
from mpdemo.jobs.record import read_record, read_text, write_record
from mpdemo.jobs.slurm_answers import Answer

PATIENCE = 0.5  # s between two looks at the user's jobs, about which Slurm is asked once per polling interval


def start(script, identity, options) -> dict:
    """Submit a script from the project's root with more options; return what the job's record holds of it."""
    job_id = slurm.sbatch(script, paths.root(), *options)
    queue.forget(identity)
    return {"id": job_id, "where": f"cluster {identity.split()[0]}", "identity": identity}


def log_files(job) -> list[Path]:
    """Return the files that hold what the job prints; one of errors comes last."""
    files = [job.out / f"slurm-{job.id}.out", job.out / f"slurm-{job.id}.err"]
    return [file for file in files if file.exists()]


def place(job) -> int | None:
    """Return the place in the queue of a job that waits."""
    return queue.position(job.record["identity"], job.id, job.polling_seconds)


def cancel(job):
    """Ask Slurm to end the job."""
    slurm.client("scancel", job.id)
    queue.forget(job.record["identity"])


def warn(job):
    """Send SIGUSR1 to the processes that srun started."""
    script = read_text(paths.root() / job.script)
    if "torch.distributed.run" in script and "SIGUSR1" not in script:
        raise UserError(f'torchrun passes no warning on in job {job.id}; do: JobSpec(..., signal="USR1@60")')
    slurm.client("scancel", "--signal=USR1", job.id)


def ask(job) -> Answer:
    """Ask the controller, then accounting; then the record of an earlier answer, the log, the script's marker."""
    if "final" in job.record:
        return Answer(**job.record["final"])
    try:
        answer = _ask_slurm(job) if _cluster_in_reach(job) else None
    except slurm.NoAnswer:
        return _last_seen(job)
    answer = _refined(job, answer) if answer else answer_from_files(job)
    if answer.state not in ("pending", "running", "unknown"):
        job.record["final"] = answer._asdict()
        if (read_record(job.out) or {}).get("id") == job.record["id"]:  # the folder may have a newer job by now
            write_record(job.out, job.record)
    return answer


def _cluster_in_reach(job) -> bool:
    """Whether the cluster in reach is the job's own: another one may have a job of the same number. Asked once."""
    if job.own_cluster is None:
        job.own_cluster = slurm.in_reach() and slurm.identity() == job.record["identity"]
    return job.own_cluster


def _ask_slurm(job) -> Answer | None:
    """Look the job up among the user's jobs; one that neither waits nor runs is asked for, once."""
    answer, silence = queue.own_job(job.record["identity"], job.id, job.polling_seconds)
    if silence:
        raise slurm.NoAnswer("squeue")
    return answer or slurm.ask(job.id)


def _last_seen(job) -> Answer:
    """Slurm's silence is no end of a job: what it said last still holds."""
    answer, silence = queue.own_job(job.record["identity"], job.id, interval=math.inf)
    seen = f", last seen {answer.state} {silence:.0f} s ago" if answer else ""
    return (answer or Answer("pending"))._replace(reason=f"Slurm does not answer{seen}")


def _refined(job, answer) -> Answer:
    """Slurm's FAILED covers three ends that mean different things to a learner."""
    if answer.state == "failed" and diagnose.stopped_with_checkpoint(job.log(), answer.exit_status):
        return answer._replace(state="stopped")
    if answer.state == "failed" and diagnose.out_of_memory(job.log()):
        return answer._replace(state="out_of_memory")
    return answer


def answer_from_files(job) -> Answer:
    """Return what log and script's marker say, once Slurm has forgotten the job. Absence is not success."""
    log = job.log()
    if state := diagnose.state_by_slurm(log):
        return Answer(state, "from the job's log; Slurm has forgotten it")
    marker = read_text(job.out / "exit-status.txt").split()
    if len(marker) == 2 and marker[0] == job.id:
        state = diagnose.state_by_status(log, int(marker[1]))
        return Answer(state, "from the script's marker; Slurm has forgotten the job", int(marker[1]))
    return Answer("unknown", "Slurm has forgotten the job, and its script left no marker")
