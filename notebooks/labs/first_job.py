"""Hand a batch script to `sbatch` from a notebook, and wait for the end of its job.

It goes to Slurm if found, else to a temporary one of two nodes. Where none can be started, bash runs the script,
with an `srun` that starts the tasks of all nodes on this machine. Taught in notebooks/00_start_here.ipynb.
"""

import contextlib
import re
import subprocess

from mpdemo.errors import UserError, wrapped
from mpdemo.jobs import slurm
from mpdemo.jobs.check import Script
from mpdemo.paths import root
from mpdemo.tools.cluster import Cluster
from mpdemo.world.processes import child_environment

SRUN = """srun() {
  while [[ $1 == -* ]]; do shift; done
  for ((n = 0; n < SLURM_NTASKS; n++)); do
    (export SLURM_PROCID=$n; "$@" | sed "s/^/$n: /") &
  done
  wait
}
"""


def sbatch(path, seconds=120.0) -> str:
    """Submit a batch script, a path below the project's root; return the number of its job, which has ended.

    Raises `UserError` where Slurm refuses it, or where the job has not ended after so many `seconds`.
    """
    with contextlib.ExitStack() as stack:
        environ = child_environment(*(("SLURM_CONF", *slurm.OF_THE_USER) if slurm.in_reach() else ()))
        if not slurm.in_reach():
            try:
                environ |= stack.enter_context(Cluster.up(nodes=2)).environ
            except (UserError, OSError):
                print("Slurm not found: bash runs the script on this machine")
                return stand_in(root() / path, environ, seconds)
            print("Slurm not found: starting a temporary one with two nodes")
        command = ["sbatch", "--wait", path]
        how = {"env": environ, "cwd": root(), "capture_output": True, "text": True, "timeout": seconds}
        try:
            done = subprocess.run(command, **how)
        except subprocess.TimeoutExpired:
            waits = f"the job has not ended after {seconds:g} s; look at it in a terminal: squeue --me"
            raise UserError(waits) from None
    print(wrapped((done.stdout + done.stderr).strip()))
    if not (number := re.search(r"batch job (\d+)", done.stdout)):
        raise UserError(f"Slurm refused {path}: {done.stderr.strip()}")
    return number[1]


def stand_in(path, environ, seconds) -> str:
    """Run a batch script without Slurm, its output in the file that it names; return the number of the process."""
    script = Script(text := path.read_text())
    environ |= {"SLURM_NTASKS": str(script.number("nodes") * script.number("ntasks-per-node"))}
    command = ["bash", "-c", f'{SRUN}eval "$0"', text]
    how = {
        "env": environ,
        "cwd": root(),
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    with subprocess.Popen(command, **how) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
    (root() / (script.value("output") or "slurm-%j.out").replace("%j", str(process.pid))).write_text(said)
    return str(process.pid)
