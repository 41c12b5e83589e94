"""Try a reader's batch script on a throw-away Slurm that lives for one job, or read its text where none can be started.

On a machine whose jobs go to a real cluster no daemon is started, and the text alone is judged.
"""

import contextlib
import re
import subprocess
import time

from mpdemo import jobs
from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.paths import root
from mpdemo.tools.cluster import Cluster
from mpdemo.world.processes import child_environment

SECONDS = 40.0  # limit for the job; four processes that load no PyTorch need about 1 s
NODE = {"cpus": 40, "gpus": 4}  # of the throw-away cluster, as in slurm/sites/generic.sbatch
ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): .")
TRIED = "It ran on a throw-away Slurm."
READ = "No Slurm can be started here, so its text was read."


def printed_by_job(path):
    """Run a batch script on two nodes; return the lines that it printed, sorted, or None where no Slurm can start."""
    check_text(path)
    with trial(nodes=2) as place:
        if not place:
            return None
        job = submit(path, *place)
        state = wait_for(job, *place, lambda state: state not in ("pending", "running"), "end", SECONDS)
        lines = lines_of(place[1])
    assert state == "completed", f"The job ended as {state}; its last line: {(lines or ['(none)'])[-1]}."
    return sorted(lines)


def check_text(path):
    """Return the text of a batch script, unless Slurm would ignore or refuse a line of it."""
    (root() / "work").mkdir(exist_ok=True)  # where the exercises put the log
    for problem in jobs.check(path.read_text(), "generic", ask_slurm=False):
        place = f"Line {problem.line}: " if problem.line else ""
        raise AssertionError(f"{place}{problem.message}.")
    return path.read_text()


@contextlib.contextmanager
def trial(nodes):
    """Start a Slurm for a ``with`` block; yields its clients' environment and the path of a log, or None."""
    with contextlib.ExitStack() as stack:
        place = None
        if not real_cluster_in_reach():
            with contextlib.suppress(UserError, OSError):
                cluster = stack.enter_context(Cluster.up(nodes=nodes, **NODE))
                place = child_environment() | cluster.environ, cluster.folder / "job.log"
        yield place


def real_cluster_in_reach():
    try:
        return slurm.in_reach() and slurm.cluster_name() != "throwaway"
    except UserError:
        return False


def submit(path, environment, log, *options):
    """Submit a batch script, its output redirected to a log; return the job's number."""
    # they override the script's own
    options = ["--parsable", f"--output={log}", f"--error={log}", *options]
    submitted = client(environment, "sbatch", *options, str(path.absolute()))
    said = submitted.stderr.strip().removeprefix("sbatch: error: ").replace("\n", "; ")
    assert submitted.returncode == 0, f"Slurm refused it: {said}."
    return submitted.stdout.strip()


def client(environment, *command):
    """Run one of Slurm's commands; one that doesn't end isn't the script's fault."""
    try:
        return subprocess.run(
            command, env=environment, cwd=root(), capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: no answer from Slurm within 60 s; run this cell again") from None


def wait_for(job, environment, log, condition, what, seconds):
    """Wait until a condition on the job's state holds; return the state."""
    end = time.monotonic() + seconds
    while True:
        answered = client(environment, "scontrol", "show", "job", "-o", job)
        if answered.returncode:
            raise UserError(f"scontrol: {answered.stderr.strip().removeprefix('scontrol: error: ')}")
        state, status = re.search(r"JobState=(\w+).* ExitCode=(\d+)", answered.stdout).groups()
        state = {"COMPLETING": "running", "CONFIGURING": "pending"}.get(state, state.lower())
        if condition(state):
            return state
        if state not in ("pending", "running"):
            assert status != "3", (
                "The run stopped with status 3, but the job ended: it didn't go back into the queue."
            )
            raise AssertionError(f"The job is {state} and didn't {what}; its log says: {last_words(log)}.")
        assert time.monotonic() < end, f"After {seconds:.0f} s the job is still {state}, and was ended."
        time.sleep(0.1)


def warn(place, to_script):
    """Send the warning that comes before the time limit."""
    client(place[1], "scancel", "--signal=USR1", *(["--batch"] if to_script else []), place[0])


def run_again(job, environment, log, seconds):
    """Let a job that is back in the queue start at once, and wait for its end."""
    time.sleep(2)  # a node refuses a job that starts again within the second of its end
    # else it waits for two minutes
    client(environment, "scontrol", "update", f"jobid={job}", "StartTime=now")
    wait_for(
        job, environment, log, lambda state: state == "completed", "end well in its second run", seconds
    )


def last_words(log):
    """Return the first error in a log, but none of torchrun's, which only reports it; or else the last line."""
    lines = lines_of(log)
    errors = [
        line for line in lines if ERROR.search(line) and not line.startswith("torch.distributed.elastic")
    ]
    return [*errors[:1], *reversed(lines), "(nothing)"][0][:120]


def lines_of(log):
    """Return the lines that the program printed, without labels: no empty ones, and none of Slurm's."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines = [
        re.sub(r"^\s*\d+: ", "", line) for line in lines if not line.startswith(("srun:", "slurmstepd:"))
    ]
    return [line for line in lines if line.strip()]
