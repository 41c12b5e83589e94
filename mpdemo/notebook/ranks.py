"""Ranks beside the kernel: real processes in one process group, and cells that run on all of them.

    ranks = start_ranks(2)

    %%ranks
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor)
    print(tensor)

Known in such a cell: torch, dist, rank, world_size, and what earlier cells defined. What the ranks print appears when
the cell ends, in order of rank. A cell that waits for ever is ended after its time-out, and says where each rank is.
Taught in notebooks/03_ddp.ipynb.
"""

import ast
import os

from IPython import get_ipython
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from mpdemo.errors import UserError
from mpdemo.jobs.site import load_site
from mpdemo.notebook import ranks_engine
from mpdemo.notebook.ranks_group import CellFailed, Ranks
from mpdemo.world.processes import check_room

LONGEST = ranks_engine.GROUP_TIMEOUT  # s
_ranks = None  # those of this kernel


def start_ranks(world_size, oversubscribe=False):
    """Start ranks beside the kernel; where as many of them live already, return those.

    Parameters
    ----------
    world_size : int
        How many: one process each, of about 400 MiB, with one thread and one core.
    oversubscribe : bool
        Allow more ranks than cores. They share the cores.

    Returns
    -------
    Ranks

    Raises
    ------
    UserError
        Too few cores or too little memory, a site that forbids computing on its front end, or no start within 60 s.
    """
    global _ranks
    if not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"world_size {world_size!r} is not allowed; allowed: a whole number from 1 on")
    if _ranks and _ranks.world_size == world_size and _ranks.alive:
        print(_ranks.describe())
        return _ranks
    check_front_end(world_size)
    check_room(world_size, oversubscribe)
    if _ranks:
        _ranks.stop()
    _ranks = Ranks(world_size)
    _ranks.start()
    print(_ranks.describe())
    return _ranks


def check_front_end(world_size):
    """Refuse ranks on a front end whose site forbids them; inside a Slurm job they are allowed."""
    if "SLURM_JOB_ID" in os.environ:
        return
    site = load_site()
    if not site.ranks_on_front_end:
        names = ("account", "partition", "qos", "constraint")
        options = "".join(f" --{name}={getattr(site, name)}" for name in names if getattr(site, name))
        raise UserError(
            f"the site {site.name} forbids computing on its front end (ranks_on_front_end = false); open JupyterLab "
            f"inside an interactive job: srun{options} --ntasks=1 --cpus-per-task={world_size} --time=01:00:00 --pty "
            "jupyter lab --no-browser --ip=0.0.0.0"
        )


@magic_arguments()
@argument("only", nargs="*", type=int, help="ranks that run the cell; without it: all")
@argument("--timeout", type=float, default=20.0, help="seconds after which a waiting cell is ended")
@argument("--expect-error", action="store_true", help="the cell shows an error: print it, and do not fail")
def ranks_magic(line, cell):
    """Run this cell on the ranks that `start_ranks` started."""
    options = parse_argstring(ranks_magic, line)
    if not _ranks:
        raise UserError("there are no ranks yet; run: ranks = start_ranks(2)")
    if not 0 < options.timeout < LONGEST:
        raise UserError(f"--timeout {options.timeout:g} is not allowed; allowed: above 0 s, below {LONGEST:g} s")
    strange = [number for number in options.only if not 0 <= number < _ranks.world_size]
    if strange:
        raise UserError(f"there is no rank {strange[0]}; there are: 0 to {_ranks.world_size - 1}")
    try:
        source = "\n" + cell  # line 1 is the line of the magic
        _check_syntax(source)
        _ranks.run(source, sorted(set(options.only)), options.timeout)
    except CellFailed as failed:
        if not options.expect_error:
            raise
        print(failed)
    else:
        if options.expect_error:
            raise UserError("the cell has --expect-error, but no rank failed; remove it, or make the cell fail")


def _check_syntax(source):
    """Report a syntax error once, not once per rank."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise CellFailed(f"SyntaxError: {error.msg}  (line {error.lineno})") from None


if get_ipython():
    get_ipython().register_magic_function(ranks_magic, "cell", "ranks")
