"""Hand a batch script to `sbatch` from a notebook, and wait for the end of its job.

It goes to Slurm if found, else to a temporary one of two nodes. Where none can be started, bash runs the script,
with an `srun` that starts the tasks of all nodes on this machine. `submit` also writes the script and shows the log,
and `terminal` runs other commands of Slurm. Taught in notebooks/11_first_job.ipynb.
"""

import contextlib
import re
import subprocess
import time

from mpdemo.errors import UserError, wrapped
from mpdemo.jobs import slurm
from mpdemo.jobs.check import Script
from mpdemo.paths import root
from mpdemo.tools.cluster import Cluster
from mpdemo.world.processes import child_environment

SRUN = """srun() {
  while [[ $1 == -* ]]; do shift; done
  for ((n = 0; n < SLURM_NTASKS; n++)); do
    (export SLURM_PROCID=$n SLURM_NODEID=$((n / PER_NODE)) SLURM_LOCALID=$((n % PER_NODE))
     export SLURM_STEP_NUM_TASKS=$SLURM_NTASKS; "$@" | sed "s/^/$n: /") &
  done
  wait
}
"""

NONE, ALIVE = "Slurm not found", "PD,CF,R,CG,S"  # the states of a job that has not ended
LONGEST_PAUSE = 5.0  # s between two questions


@contextlib.contextmanager
def reached():
    """Yield the environment in which Slurm's commands work, for a ``with`` block; None where no Slurm can start."""
    with contextlib.ExitStack() as stack:
        environ = child_environment(*(("SLURM_CONF", *slurm.OF_THE_USER) if slurm.in_reach() else ()))
        environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # simulated nodes have no names, which PyTorch warns of
        if not slurm.in_reach():
            try:
                environ |= stack.enter_context(Cluster.up(nodes=2)).environ
                print(f"{NONE}: starting a temporary one with two nodes")
            except (UserError, OSError):
                environ = None
        yield environ


def sbatch(path, seconds=120.0) -> str:
    """Submit a batch script, a path below the project's root; return the number of its job, which has ended.

    Raises `UserError` where Slurm refuses it, or where the job has not ended after so many `seconds`.
    """
    with reached() as environ:
        if environ is None:
            print(f"{NONE}: bash runs the script on this machine")
            return stand_in(root() / path, child_environment(), seconds)
        # its own --wait looks every 30 s after a while
        how = {"env": environ, "cwd": root(), "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(["sbatch", path], **how)
        print(wrapped((done.stdout + done.stderr).strip()))
        if not (number := re.search(r"batch job (\d+)", done.stdout)):
            raise UserError(f"Slurm refused {path}: {done.stderr.strip()}")
        wait(number[1], seconds, how)
    return number[1]


def wait(number, seconds, how):
    """Wait until squeue no longer lists a job; it is asked ever more rarely, since others ask the same controller."""
    end, pause, command = time.monotonic() + seconds, 0.2, ["squeue", "-h", "-t", ALIVE, "-j", number]
    while time.monotonic() < end:
        done = subprocess.run(command, **how)
        # a controller that doesn't answer says nothing of the job
        if not done.stdout.strip() and (not done.returncode or "Invalid job id" in done.stderr):
            return
        time.sleep(pause)
        pause = min(LONGEST_PAUSE, 1.2 * pause)
    raise UserError(f"the job has not ended after {seconds:g} s; look at it in a terminal: squeue --me")


def submit(name, lines, **directives) -> str:
    """Write a batch script of some lines into ``work/``, submit it, wait, and print its log; return the log."""
    words = {"nodes": 2, "ntasks_per_node": 2, "time": "00:05:00"} | directives
    head = [f"#SBATCH --{word.replace('_', '-')}={value}" for word, value in words.items()]
    head = ["#!/bin/bash", f"#SBATCH --job-name={name}", *head, f"#SBATCH --output=work/{name}-%j.out"]
    path = root() / "work" / f"{name}.sbatch"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*head, "", lines.strip(), ""]))
    number = sbatch(f"work/{name}.sbatch")
    print(log := (root() / "work" / f"{name}-{number}.out").read_text())
    return log


def terminal(*commands) -> str:
    """Run commands in a shell in which Slurm is found, print each with what it says, and return that text."""
    how = {"cwd": root(), "capture_output": True, "text": True, "timeout": 60}
    with reached() as environ:
        if environ is None:
            print(f"{NONE}, and none can be started here")
            return ""
        said = []
        for command in commands:
            done = subprocess.run(["bash", "-c", command], env=environ, **how)
            said.append(f"$ {command}\n{done.stdout}{done.stderr}".rstrip())
            print(said[-1])
        return "\n".join(said)


def stand_in(path, environ, seconds) -> str:
    """Run a batch script without Slurm, its output in the file that it names; return the number of the process."""
    script = Script(text := path.read_text())
    per_node = script.number("ntasks-per-node") or 1
    environ |= {"SLURM_NTASKS": str(script.number("nodes") * per_node), "PER_NODE": str(per_node)}
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
