"""Try a reader's job file: submit it to a throw-away Slurm that lives for one job, and return what it printed.

Where no Slurm can be started (see `mpdemo.cluster`), or a real cluster is in reach, the file's text alone is judged.
"""

import contextlib
import re
import subprocess
import time

from mpdemo import jobs
from mpdemo.cluster import Cluster
from mpdemo.errors import UserError
from mpdemo.exercises.check import Wrong, require
from mpdemo.jobs import slurm
from mpdemo.jobs.record import read_text
from mpdemo.jobs.slurm_answers import explain, parse_scontrol
from mpdemo.paths import root
from mpdemo.world.processes import child_environment

SECONDS = 40.0  # limit for the job; four processes that load no PyTorch need about 1 s
NODE = {"cpus": 40, "gpus": 4}  # of the throw-away cluster, as in slurm/sites/generic.toml
TRIED = "It ran on a throw-away Slurm."
READ = "No Slurm can be started here, so only its text was read."


def printed_by_job(path) -> list[str] | None:
    """Check a job file's text, then run it on two nodes.

    Parameters
    ----------
    path : Path
        The reader's file. Its log is redirected to the cluster's folder, which goes with the cluster.

    Returns
    -------
    list of str or None
        The lines that the job printed, in alphabetical order, without srun's labels; None where no Slurm can be
        started.

    Raises
    ------
    Wrong
        Slurm would ignore a line, it refused the file, or the job did not end within `SECONDS`.
    UserError
        Slurm does not answer: no fault of the file.
    """
    check_text(path)
    with trial(nodes=2) as place:
        return _run(path, *place) if place else None


def check_text(path) -> str:
    """Return a job file's text; raise `Wrong` for a line that Slurm would ignore or refuse."""
    text = path.read_text()
    (root() / "work").mkdir(exist_ok=True)  # where the exercises put the log
    for problem in jobs.check(text, "generic", ask_slurm=False):
        place = f"Line {problem.line}: " if problem.line else ""
        raise Wrong(f"{place}{problem.message}.")
    return text


@contextlib.contextmanager
def trial(nodes):
    """Start a throw-away Slurm for a ``with`` block; yields its clients' environment and the path of a log.

    Yields None where no Slurm can be started, or the jobs of this machine go to a real cluster.
    """
    with contextlib.ExitStack() as stack:
        place = None
        if not real_cluster_in_reach():
            with contextlib.suppress(UserError, OSError):
                cluster = stack.enter_context(Cluster.up(nodes=nodes, owned=True, **NODE))
                place = child_environment() | cluster.environ, cluster.folder / "job.log"
        yield place


def real_cluster_in_reach() -> bool:
    """Whether the jobs of this machine go to a real cluster: no daemon is started on a front end."""
    try:
        return slurm.in_reach() and slurm.cluster_name() != "throwaway"
    except UserError:
        return False


def _run(path, environment, log) -> list[str]:
    """Submit the file, wait for the job's end, and read its log."""
    job = submit(path, environment, log)
    end = time.monotonic() + SECONDS
    while (state := ask(environment, job).state) in ("pending", "running"):
        if time.monotonic() > end:
            raise Wrong(f"After {SECONDS:.0f} s the job is still {state}, and was ended.")
        time.sleep(0.1)
    lines = [re.sub(r"^\s*\d+: ", "", line) for line in read_text(log).splitlines()]
    own = own_lines(lines)
    require(state == "done", f"The job ended as {state}; its last line: {(own or lines or ['(none)'])[-1]}.")
    return sorted(own)


def submit(path, environment, log, *options) -> str:
    """Submit a job file, its output redirected to a log; return the job's number, or raise `Wrong`."""
    options = ["--parsable", f"--output={log}", f"--error={log}", *options]  # they count more than the file's own
    submitted = client(environment, "sbatch", *options, str(path.absolute()))
    require(submitted.returncode == 0, f"Slurm refused it: {explain('sbatch', submitted.stderr)}.")
    return submitted.stdout.strip()


def ask(environment, job):
    """Return Slurm's present answer about a job; raise `UserError` where it gives none."""
    answered = client(environment, "scontrol", "show", "job", "-o", job)
    if answered.returncode:
        raise UserError(explain("scontrol", answered.stderr))
    return parse_scontrol(answered.stdout)


def own_lines(lines) -> list[str]:
    """Return the lines that the program printed: no empty ones, and none of Slurm's."""
    return [line for line in lines if line.strip() and not line.startswith(("srun:", "slurmstepd:"))]


def client(environment, *command):
    """Run one of Slurm's commands; return the completed process, or raise `UserError` where it does not end."""
    options = {"capture_output": True, "text": True, "timeout": slurm.TIMEOUT}
    try:
        return subprocess.run(command, env=environment, cwd=root(), **options)
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: no answer from Slurm within {slurm.TIMEOUT} s; run this cell again") from None
