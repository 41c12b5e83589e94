"""How `mpdemo.jobs.job.Job` asks, cancels and warns a job on this machine, and how one is started.

The same command in as many processes, watched by a supervisor (`mpdemo.world.supervisor`). The job ends with the
Python, the notebook's kernel, that began it.

JupyterLab may itself run in a Slurm job, with GPUs of its own. A site file then says ``inside_a_job = "steps"``, or
"queue" for jobs as from a login node. A step is the job's own file, run by bash under the same supervisor: its srun
starts processes on the nodes that the surrounding job holds, and Slurm refuses what is more than that.
"""

import dataclasses
import json
import os
import platform
import shutil
import signal
import tempfile
import time
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import ends, slurm
from mpdemo.jobs.launch_text import torchrun_signals
from mpdemo.jobs.sbatch_text import cpus_per_task, fitted, gpu_rows, render
from mpdemo.jobs.slurm import Answer
from mpdemo.world import warm
from mpdemo.world.devices import ON_THE_CPU, too_few_gpus
from mpdemo.world.processes import check_room, child_environment, first_child, is_running, start_time

HERE = "this machine"  # where a job runs that Slurm does not know
PATIENCE = 0.05  # s between two looks at a job
PREFIX = "mpdemo-"  # of the folder for temporary files
GRACE = 5.0  # s between the request to end and the kill
LOG, STATUS = "log.txt", "exit-status.json"
RANKS = "processes.txt"  # the number of each rank's process, a line each
PIPES = {}  # run's folder -> the pipe whose end ends its job; open as long as this Python lives, or until that end
# How the supervisor ended a job -> state and reason.
ENDS = {"cancelled": ("cancelled", ""), "timeout": ("timeout", "TimeLimit")}
ENDS |= {"orphaned": ("cancelled", "it ended with the Python that had started it")}
HELD = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")  # what srun needs to find the job; the rest are options


def log_files(job) -> list[Path]:
    """Return the one file that holds what the job prints."""
    return [job.out / LOG]


def cancel(job):
    """Let the supervisor end the job, and wait until it has done so."""
    end = time.monotonic() + GRACE + 6
    if supervisor_lives(job.record):
        os.kill(int(job.id), signal.SIGTERM)
    while ask(job).state == "running":
        if time.monotonic() > end:
            raise TimeoutError(f"job {job.id} ({job.name}) does not end; do: kill -9 {job.id}")
        time.sleep(PATIENCE)


def warn(job):
    """Send SIGUSR1 to the supervisor, which passes it on."""
    end = time.monotonic() + GRACE
    while not first_child(int(job.id)) and supervisor_lives(job.record) and time.monotonic() < end:
        time.sleep(PATIENCE)  # it does not listen yet
    if supervisor_lives(job.record):
        os.kill(int(job.id), signal.SIGUSR1)


def ask(job) -> Answer:
    """Return what is known of the job: its end as its supervisor wrote it, else whether that supervisor lives."""
    ended = not supervisor_lives(job.record)
    # read after the question: once it has ended, the file is complete
    if answer := answer_at_the_end(job.out):
        PIPES.pop(str(job.out), None)
        return answer
    if job.record.get("host", platform.node()) != platform.node():
        return Answer("unknown", f"it was started on {job.record['host']}")
    if ended:
        scratch = Path(job.record["scratch"])
        if scratch.parent == Path(tempfile.gettempdir()) and scratch.name.startswith(PREFIX):
            shutil.rmtree(scratch, ignore_errors=True)  # never another folder: the record may be anybody's
        return Answer("cancelled", "its supervisor was killed")
    return Answer("running", "", None, time.time() - job.record["submitted"])


def answer_at_the_end(out) -> Answer | None:
    """Return how a job ended, as its supervisor wrote it; None while it runs. Its log is read only if it failed."""
    if not (out / STATUS).exists():
        return None
    end, log = json.loads((out / STATUS).read_text()), out / LOG
    status = end["exit_status"]
    text = log.read_text(errors="replace") if status and log.exists() else ""
    state, reason = ENDS.get(end["how"]) or (ends.state_by_status(text, status), "")
    return Answer(state, reason, status, end["run_time"])


def supervisor_lives(record) -> bool:
    """Whether the supervisor of a record is alive; a process of its number that started at another time is not it."""
    return is_running(int(record["id"]), record.get("started"))


def surrounding_job(site) -> str | None:
    """Return the number of the job whose steps the jobs become; None where they are queued, or there is no such job."""
    return os.environ.get("SLURM_JOB_ID") if site.inside_a_job == "steps" else None


def refuse(spec, site):
    """Refuse what cannot run without a queue, or has no room on this machine or in the job around us."""
    if not surrounding_job(site):
        check_room(spec.world_size, spec.oversubscribe)
    elif gpu_rows(*fitted(spec, site)):  # steps that overlap all get the first GPUs
        job, own = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_STEP_ID", "batch")
        for step in slurm.client("squeue", "-h", "-s", "-j", job, "-o", "%i").split():
            if step.rpartition(".")[2] not in (own, "batch", "extern", "interactive"):
                raise UserError(f"step {step} of job {job} may use its GPUs; do: wait for its end, then submit again")


def start(spec, site) -> dict:
    """Start a job's processes under a supervisor; return what the job's record holds of them."""
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))  # short: sockets are made below it
    out, around = paths.root() / spec.out, surrounding_job(site)
    order = {"cwd": str(paths.root()), "status": str(out / STATUS), "ranks": str(out / RANKS), "grace": GRACE}
    order |= {"name": spec.name, "signal": spec.signal, "scratch": str(scratch), "limit": slurm.limit(spec.time_limit)}
    order |= step(spec, site, order["limit"]) if around else ranks(spec, scratch)
    try:
        pid, PIPES[str(out)] = warm.supervise(order, out / LOG)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(f"cannot start a job here: {error}") from None
    record = {"id": pid, "started": start_time(pid), "identity": None, "where": f"job {around}" if around else HERE}
    return record | {"host": platform.node(), "scratch": str(scratch)}


def ranks(spec, scratch) -> dict:
    """Return an order for processes of this machine: no launcher and no Slurm job around them, one thread each.

    Where the GPUs are too few, their devices are CPU cores.
    """
    own = warm.OF_RANKS | {"TMPDIR": str(scratch)}
    own |= {"MPDEMO_DATA": str(paths.root() / spec.stage)} if spec.stage else {}  # here: on this machine's disk
    environment = child_environment() | own | (ON_THE_CPU if too_few_gpus(spec.devices) else {})
    order = {"command": spec.command, "processes": spec.world_size, "environment": environment}
    return order | {"torchrun": spec.launcher == "torchrun"}  # which tells a single process its place, too


def step(spec, site, limit) -> dict:
    """Return an order for a step of the job around us, which ends before that job."""
    tasks = {"SLURM_CPUS_PER_TASK": str(cpus_per_task(*fitted(spec, site))[0])}
    environment = child_environment(*HELD) | tasks | torchrun_signals(spec)  # `warn` may send an unasked signal
    if (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
        limit = min(limit, max(1.0, int(end) - time.time()))
    bash = ["bash", *["-l"] * site.login_shell, "-c", step_text(spec, site)]
    return {"command": bash, "environment": environment, "limit": limit}


def step_text(spec, site) -> str:
    """Return the job's file with what a step needs: its own shape, as options of srun, and its own port."""
    spec, site = fitted(dataclasses.replace(spec, requeue=False), site)  # that would requeue the job around it
    shape = ["--overlap", "--relative=0", f"--nodes={spec.nodes}", f"--ntasks={spec.nodes * spec.tasks_per_node}"]
    shape += [f"--ntasks-per-node={spec.tasks_per_node}", *([f"--hint={site.hint}"] if site.hint else [])]
    shape += [f"--{option}={value}" for option, value, _ in gpu_rows(spec, site)]
    text = render(spec, dataclasses.replace(site, srun_options=(*shape, *site.srun_options)))
    return text.replace("SLURM_JOB_ID % 10000", "(SLURM_JOB_ID + $$) % 10000")
