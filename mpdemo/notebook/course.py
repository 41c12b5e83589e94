"""What every notebook uses: `run` starts a job, `measure` times a strategy, `show` displays source, `check` judges.

job = run("torchrun --standalone --nproc-per-node=2 notebooks/scripts/first_ddp.py")
print(job.output())                      # waits for the end
job = run("torchrun --standalone --nproc-per-node=2 -m mpdemo.rungs.ddp --out runs/train_ddp")
await job                                # live
row = await measure("ddp")               # its speed beside the single device's, in runs/speed_ddp
ladder()                                 # every strategy so far
"""

import os
from typing import Any

from IPython.display import display

from mpdemo import paths
from mpdemo.errors import UserError, wrapped
from mpdemo.jobs import spec_of, submit
from mpdemo.notebook.check import check
from mpdemo.notebook.ladder import in_words, ladder_chart, ladder_table
from mpdemo.notebook.live_view import Run
from mpdemo.notebook.player import player
from mpdemo.notebook.ranks import start_ranks
from mpdemo.notebook.records import beside
from mpdemo.notebook.show import show

__all__ = ["check", "ladder", "measure", "player", "run", "show", "start_ranks"]


def run(
    command: str, nodes: int = 1, name: str | None = None, *, resubmit: bool = False, **words: Any
) -> Run:
    """Start a command as a job, on the cluster or on this machine, and return it: a `mpdemo.jobs.Job` to be awaited.

    On this machine the processes start as torchrun starts them. A cell that is run again finds its job, which runs anew
    only if it was cancelled, ended with its kernel, or a program has changed: the script, or a Python file of the
    project's folder that it imports or names. Data and configuration files are not looked at; for these there is
    `resubmit`.

    Parameters
    ----------
    command : str
        What a terminal takes in the project's folder: ``torchrun``, ``python`` or ``mpdemo``, and what follows it. No
        shell reads it, so what a shell would replace or act on is refused unless it is quoted: ``$X``, ``~``, ``*``,
        ``?``, ``[a]``, ``{a,b}``, ``#``, pipes and the like.
    nodes : int
        How many nodes run it. The batch script adds what srun and torchrun need on several.
    name : str, optional
        Of the job and of its folder in ``runs``; a training run's folder is its ``--out``.
    resubmit : bool
        Run it again although it has run.
    **words
        Further words of `mpdemo.jobs.JobSpec`: ``time_limit``, ``signal``, ``requeue``, ``oversubscribe``.
    """
    spec = spec_of(command, nodes, name, **words)
    script = paths.root() / spec.command[0]
    if not spec.command[0].startswith("-") and not any(
        map(os.path.isfile, (script, script / "__main__.py"))
    ):
        raise UserError(f"no script {spec.command[0]!r} in the project's folder, {paths.root()}")
    job = submit(spec, resubmit=resubmit, announce=False)
    return Run(job.record, job.out)


async def measure(rung: str, processes: int = 2, rounds: int | None = None) -> dict[str, Any]:
    """Time steps of a strategy alternately with the single device's, in a job; show what came out, and return it.

    Beside it stand an H100's record and your own, where they have timed it.

    Parameters
    ----------
    rung : str
        A name of `mpdemo.settings.RUNGS`.
    processes : int
        How many, on one node.
    rounds : int, optional
        How often each is timed: 9 times by default. Fewer than 6 give no interval and so no verdict.

    Returns
    -------
    dict
        The row of the strategy in what the job, `mpdemo.labs.speed`, wrote into ``runs/speed_RUNG``: times in seconds,
        memory in bytes.
    """
    lab = f"-m mpdemo.labs.speed runs/speed_{rung} {rung} {rounds or ''}"
    job = run(f"torchrun --standalone --nproc-per-node={processes} {lab}", name=f"speed_{rung}")
    await job
    row = next(row for row in job.result()["rows"] if row["rung"] == rung)
    print(wrapped(in_words(row)))
    display(beside(rung, row))
    return row


def ladder() -> None:
    """Display the table of all strategies that have run, and a step of each of them on one time axis."""
    display(ladder_table(), ladder_chart())
