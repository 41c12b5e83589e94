"""How `mpdemo.jobs.job.Job` asks, cancels and warns a job that Slurm runs, and how one is submitted."""

import contextlib
import math
import re
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import diagnose, queue, slurm
from mpdemo.jobs.slurm import Answer

PATIENCE = 0.5  # s between two looks at the user's jobs, about which Slurm is asked once per polling interval


def start(script, identity, options) -> dict:
    """Submit a script from the project's root with more options; return what the job's record holds of it."""
    said = slurm.client("sbatch", "--parsable", *options, str(script), cwd=paths.root())
    queue.forget(identity)
    return {"id": said.split()[-1], "where": f"cluster {identity.split()[0]}", "identity": identity}


def log_files(job) -> list[Path]:
    """Return the files that hold what the job prints; one of errors comes last."""
    return [job.out / f"slurm-{slurm.number(job.id)}.{end}" for end in ("out", "err")]


def cancel(job):
    """Ask Slurm to end the job."""
    slurm.client("scancel", job.id)
    queue.forget(job.record["identity"])


def warn(job):
    """Send SIGUSR1 to the processes that srun started."""
    file = paths.root() / job.script
    script = file.read_text(encoding="utf-8") if file.exists() else ""
    if "torch.distributed.run" in script and "SIGUSR1" not in script:
        raise UserError(f'torchrun passes no warning on in job {job.id}; do: JobSpec(..., signal="USR1@60")')
    slurm.client("scancel", "--signal=USR1", job.id)


def ask(job) -> Answer:
    """Ask the controller, then accounting; then the record of an earlier answer, the log, the script's marker."""
    if "final" in job.record:
        return Answer(**job.record["final"])
    try:
        answer = _ask_slurm(job)
    except slurm.NoAnswer:
        return _last_seen(job)
    answer = _refined(job, answer) if answer else answer_from_files(job)
    if answer.state not in ("pending", "running", "unknown"):
        job.keep(answer)
    return answer


def _ask_slurm(job) -> Answer | None:
    """Look the job up among the user's jobs; one that neither waits nor runs is asked for, once.

    Another cluster in reach may have a job of the same number, so it is not asked.
    """
    if job.own_cluster is None:
        job.own_cluster = slurm.in_reach() and slurm.identity() == job.record["identity"]
    if not job.own_cluster:
        return None
    answer, silence = queue.own_job(job.record["identity"], job.id, job.polling_seconds)
    if silence:
        raise slurm.NoAnswer("squeue")
    return answer or look_up(job.id)


def look_up(job_id) -> Answer | None:
    """Return what Slurm knows of a job; None once it has forgotten it. Absence is not success.

    The controller remembers a job for a few minutes after its end (``MinJobAge``), accounting for long, if it is on;
    a site may keep a job completion file, too (``sacct -c``).
    """
    try:
        line = slurm.client("scontrol", "show", "job", "-o", job_id)
    except slurm.SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
    else:  # the job's name may hold anything, so only the fields after it are read; the first of a name counts
        fields = dict(reversed(re.findall(r" (\w+)=(\S*)", line.partition(" UserId=")[2])))
        return slurm.make_answer(*(fields.get(name, "") for name in ("JobState", "Reason", "ExitCode", "RunTime")))
    for options in (("-X", "-o", "State,ExitCode,Elapsed"), ("-c", "-o", "State,ExitCode")):
        with contextlib.suppress(slurm.SlurmError):
            rows = slurm.client("sacct", "-n", "-P", "-j", job_id, *options).splitlines()
            if rows and rows[-1].split("|")[0]:
                state, exit_code, run_time = (*rows[-1].split("|"), "")[:3]
                return slurm.make_answer(state, "", exit_code, run_time)
    return None


def _last_seen(job) -> Answer:
    """Slurm's silence is no end of a job: what it said last still holds."""
    answer, silence = queue.own_job(job.record["identity"], job.id, interval=math.inf)
    seen = f", last seen {answer.state} {silence:.0f} s ago" if answer else ""
    return (answer or Answer("pending"))._replace(reason=f"Slurm does not answer{seen}")


def _refined(job, answer) -> Answer:
    """Slurm's FAILED covers three ends that mean different things to a learner."""
    if answer.state != "failed":
        return answer
    log = job.log()
    if diagnose.stopped_with_checkpoint(log, answer.exit_status):
        return answer._replace(state="stopped")
    return answer._replace(state="out_of_memory") if diagnose.MEMORY.search(log) else answer


def answer_from_files(job) -> Answer:
    """Return what log and script's marker say, once Slurm has forgotten the job. Absence is not success."""
    log, marker = job.log(), job.out / "exit-status.txt"
    if state := diagnose.state_by_slurm(log):
        return Answer(state, "from the job's log; Slurm has forgotten it")
    words = marker.read_text().split() if marker.exists() else []
    if len(words) == 2 and words[0] == slurm.number(job.id):
        state = diagnose.state_by_status(log, int(words[1]))
        return Answer(state, "from the script's marker; Slurm has forgotten the job", int(words[1]))
    return Answer("unknown", "Slurm has forgotten the job, and its script left no marker")
