"""Ranks beside the kernel: real processes in one process group, and cells that run on all of them.

    ranks = start_ranks(2)

    %%ranks
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor)
    print(tensor)

A cell knows torch, dist, rank, world_size and what earlier cells defined. What the ranks print is shown while they run
where there is a page to show it, and printed at the end in order of rank. A cell that hangs is ended after its timeout,
and soon after some rank has failed; it says where each rank is.
Taught in notebooks/20_processes.ipynb.
"""

import ast
import os
import time

from IPython import get_ipython
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from mpdemo.errors import UserError, wrapped
from mpdemo.jobs.site import load_site
from mpdemo.ranks import CellFailed, Processes
from mpdemo.world.processes import check_room

ENDED = "The ranks were ended: run ranks.restart(), or this cell again, for fresh ones without earlier variables."
EARLIER = "; a cell above defines it? Run that one first"
PATIENCE = 2.0  # s that other ranks may take once one has failed: most wait for it, and would hang
_ranks = None  # those of this kernel


def start_ranks(world_size: int, oversubscribe: bool = False) -> "Ranks":
    """Start ranks beside the kernel; if as many are alive already, return them.

    Parameters
    ----------
    world_size : int
        How many: one process each, of about 400 MiB, with one thread and one core.
    oversubscribe : bool
        Allow more ranks than cores. They share the cores.

    Raises
    ------
    UserError
        More ranks than cores, or a login node whose site forbids them.
    """
    global _ranks
    if not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"world_size {world_size!r} is not allowed; allowed: a whole number from 1 on")
    if _ranks and _ranks.world_size == world_size and _ranks.alive:
        _ranks.describe()
        return _ranks
    check_login_node(world_size)
    check_room(world_size, oversubscribe)
    if _ranks:
        _ranks.stop()
    _ranks = Ranks(world_size)
    return _ranks


def check_login_node(world_size):
    """Refuse ranks on a login node whose site forbids them; inside a Slurm job they are allowed."""
    if "SLURM_JOB_ID" in os.environ:
        return
    site = load_site()
    if not site.ranks_on_front_end:
        raise UserError(
            f"the site {site.name} forbids computing on its login node (ranks_on_front_end = false); open JupyterLab "
            f"in an interactive job: srun --cpus-per-task={world_size} --pty jupyter lab --no-browser --ip=0.0.0.0"
        )


class Ranks:
    """The ranks of one kernel. `start_ranks` makes it; the magic ``%%ranks`` calls `run`."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.cells = 0  # that were run
        self.processes = None
        self.restart(adjective="")

    @property
    def alive(self) -> bool:
        """Whether every rank lives."""
        return self.processes is not None and self.processes.alive

    def stop(self):
        """End the processes. The next cell starts fresh ones."""
        processes, self.processes = self.processes, None
        if processes:
            processes.stop()

    def restart(self, adjective="fresh "):
        """End the ranks, even those that hang, and start fresh ones, which know no earlier variables."""
        self.stop()
        self.processes = Processes(self.world_size)
        self.describe(adjective)

    def describe(self, adjective=""):
        """Print one line: how many ranks there are, and on what."""
        cores = "one core each" if len(os.sched_getaffinity(0)) >= self.world_size else "sharing the cores"
        fresh = ", without earlier variables" if adjective else ""
        print(f"{self.world_size} {adjective}ranks are ready: gloo, {cores}{fresh}")

    def run(self, source, only=(), timeout=20.0):
        """Run a cell on all ranks, or on those in `only`; print what each one prints, in order of rank.

        After `CellFailed` of a rank that ended, or was not done in time, all ranks are ended: after `timeout` seconds,
        and `PATIENCE` seconds after another one failed.
        """
        try:
            ast.parse(source)
        except SyntaxError as error:  # said once, not once per rank
            raise CellFailed(f"SyntaxError: {error.msg}  (line {error.lineno})") from None
        if not self.processes:
            self.restart()
        self.cells += 1
        processes = self.processes
        chosen = only or range(self.world_size)
        parts = [(source, f"<ranks cell {self.cells}>")]
        begin = time.monotonic()
        try:
            if not processes.dead():
                processes.run(parts, chosen, timeout, PATIENCE, show=True)
        except KeyboardInterrupt:
            try:
                self._show(chosen)
                self._fail(f"Interrupted: {processes.places(chosen, parts)}")
            finally:
                # after a second interrupt, too: late answers would be taken for those of the next cell
                self.stop()
        in_time = time.monotonic() - begin < timeout
        dead = processes.dead()
        # the others' errors would only say that a connection closed
        failed = self._show(chosen, errors=not dead)
        if dead or len(processes.answers) < len(chosen):
            when = f"{PATIENCE:g} s after an error" if in_time else f"After {timeout:g} s"
            self._fail(dead or f"{when} {processes.places(chosen, parts)}")
        if failed:
            raise CellFailed(
                f"the cell failed on rank{'s'[: len(failed) - 1]} {' and '.join(failed)}; see above"
            )

    def _show(self, chosen, errors=True) -> list:
        """Print each rank's output, and its error unless `errors` is False; return the ranks that failed."""
        failed = []
        for number in chosen:
            lines = self.processes.ranks[number].labelled()
            _, error, frames = self.processes.answers.get(number, (None, None, []))
            if error and errors:
                failed.append(str(number))
                line = error + (f"  (line {frames[-1][1]})" if frames else "")
                line += EARLIER if error.startswith("NameError") else ""
                lines.append(wrapped(line, prefix=f"[rank {number}] "))
            print(*lines, sep="\n", end="\n" if lines else "")
        return failed

    def _fail(self, sentence):
        """End all ranks and raise: a process group with a rank that waits or is gone cannot be used again."""
        self.stop()
        raise CellFailed(f"{sentence.removesuffix('.')}. {ENDED}")


@magic_arguments()
@argument("only", nargs="*", type=int, help="ranks that run the cell; without it: all")
@argument("--timeout", type=float, default=20.0, help="seconds after which a waiting cell is ended")
@argument("--expect-error", action="store_true", help="the cell shows an error: print it, and do not fail")
def ranks_magic(line, cell):
    """Run this cell on the ranks that `start_ranks` started."""
    options = parse_argstring(ranks_magic, line)
    if not _ranks:
        raise UserError("there are no ranks yet; run: ranks = start_ranks(2)")
    strange = [number for number in options.only if not 0 <= number < _ranks.world_size]
    if strange:
        raise UserError(f"there is no rank {strange[0]}; there are: 0 to {_ranks.world_size - 1}")
    try:
        # line 1 is the line of the magic
        _ranks.run("\n" + cell, sorted(set(options.only)), options.timeout)
    except CellFailed as failed:
        if not options.expect_error:
            raise
        print(wrapped(str(failed)))
    else:
        if options.expect_error:
            raise UserError(
                "the cell has --expect-error, but no rank failed; remove it, or make the cell fail"
            )


if get_ipython():
    get_ipython().register_magic_function(ranks_magic, "cell", "ranks")
