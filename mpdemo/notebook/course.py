"""The course model: one small transformer on one data set, which every notebook trains with another strategy.

    job = train("ddp", processes=2)          # the training run: a batch script, submitted, in runs/train_ddp
    await follow(job)
    row = await measure("ddp")               # its speed beside the single device's, in runs/speed_ddp
    ladder()                                 # every strategy so far

Its settings are those of `mpdemo.settings.recipe`.
"""

import contextlib
import io
from dataclasses import fields
from pathlib import Path
from typing import Any

from IPython.display import display

from mpdemo.errors import wrapped
from mpdemo.jobs import Job, JobFailed, JobSpec, submit, train_command
from mpdemo.jobs.looks import unlabelled
from mpdemo.notebook.check import check
from mpdemo.notebook.ladder import in_words, ladder_chart, ladder_table
from mpdemo.notebook.live_view import follow
from mpdemo.notebook.player import player
from mpdemo.notebook.ranks import start_ranks
from mpdemo.notebook.show import diff, show
from mpdemo.settings import recipe

__all__ = ["check", "diff", "follow", "ladder", "launch", "measure"]
__all__ += ["player", "run", "show", "start_ranks", "train"]
OF_THE_JOB = {field.name for field in fields(JobSpec)} - {"name", "command", "out", "processes_per_node"}


def train(
    rung: str,
    processes: int = 1,
    nodes: int = 1,
    *,
    name: str | None = None,
    script: str | None = None,
    resubmit: bool = False,
    **changes: Any,
) -> Job:
    """Submit the course model's training run with a strategy; return its `mpdemo.jobs.Job`.

    Parameters
    ----------
    rung : str
        A name of `mpdemo.settings.RUNGS`.
    processes, nodes : int
        Processes per node, and nodes.
    name : str, optional
        The job's name in the queue; by default that of the run's folder.
    script : str, optional
        Where the batch script is written, as ``"slurm/03_ddp.sbatch"``; by default in the run's folder.
    resubmit : bool
        Run it again although it has run.
    **changes
        Words of `mpdemo.jobs.JobSpec`, and settings that are added to the recipe or replace it (see recipe.py).
    """
    words = {key: changes.pop(key) for key in OF_THE_JOB & changes.keys()}
    settings = recipe(rung, **changes)
    out = settings["out"]
    spec = JobSpec(name or out.split("/")[-1], train_command(**settings), out, nodes, processes, **words)
    return submit(spec, script=script, resubmit=resubmit)


def run(name: str, *command: Any, processes: int = 1, nodes: int = 1, resubmit: bool = False, **words: Any) -> Job:
    """Submit any program as a job in the folder ``runs/NAME``; return its `mpdemo.jobs.Job`.

    Parameters
    ----------
    name : str
        Of the job and of its folder.
    *command
        A script or ``"-m"`` and a module, and its arguments: what stands after ``python``.
    processes, nodes, resubmit
        As for `train`.
    **words
        Further words of `mpdemo.jobs.JobSpec`.
    """
    return submit(JobSpec(name, command, f"runs/{name}", nodes, processes, **words), resubmit=resubmit)


def launch(*command: Any, processes: int = 1, fails: bool = False, timeout: float = 120.0, **words: Any) -> str:
    """Run a script as ``torchrun --standalone --nproc-per-node N`` does, in a job; return what it printed.

    A job, since a process that a cell starts itself would outlive the kernel, and on a cluster run on the login node.

    Parameters
    ----------
    *command, processes, **words
        As for `run`, on one node.
    fails : bool
        Whether it may fail.
    timeout : float
        Seconds that it may run.

    Raises
    ------
    JobFailed
        It failed, and must not; with the end of its log.
    TimeoutError
        It still runs after `timeout`. It is ended.
    """
    name = f"launch_{Path(command[1 if command[0] == '-m' else 0]).stem}"
    words.setdefault("launcher", "torchrun")
    with contextlib.redirect_stdout(io.StringIO()):  # where it runs, which is not what the cell is about
        job = run(name, *command, processes=processes, resubmit=True, **words)
    try:
        state = job.wait(timeout)
    finally:
        job.cancel()  # where it hangs; one that has ended stays as it is
    if state != "done" and not fails:
        raise JobFailed(f"{' '.join(map(str, command))} failed: {job.log()[-2000:]}")
    lines = unlabelled(job.log())  # without the labels of srun, what it says of a failed task, c10d's warnings of IPv6
    return "\n".join(line for line in lines if not line.startswith("srun:") and "socket.cpp" not in line).strip()


async def measure(rung: str, processes: int = 2, nodes: int = 1, *rounds: int, **words: Any) -> dict[str, Any]:
    """Time steps of a strategy alternately with the single device's, in a job; say what came out, and return it.

    Parameters
    ----------
    rung : str
        A name of `mpdemo.settings.RUNGS`.
    processes, nodes : int
        Processes per node, and nodes.
    *rounds : int
        How often each is timed: 9 times by default. Fewer than 6 give no interval and so no verdict.
    **words
        As for `run`.

    Returns
    -------
    dict
        The row of the strategy in what the job, `mpdemo.labs.speed`, wrote into ``runs/speed_RUNG``: times in seconds,
        memory in bytes.
    """
    name = f"speed_{rung}"
    command = ("-m", "mpdemo.labs.speed", f"runs/{name}", rung, *rounds)
    job = run(name, *command, processes=processes, nodes=nodes, **words)
    await follow(job)
    row = next(row for row in job.result()["rows"] if row["rung"] == rung)
    print(wrapped(in_words(row)))
    return row


def ladder() -> None:
    """Display the table of all strategies that have run, and a step of each of them on one time axis."""
    display(ladder_table(), ladder_chart())
