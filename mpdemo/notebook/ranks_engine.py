"""What runs inside the processes of `start_ranks`: how one begins, joins the process group, and runs a cell.

The kernel's side is ranks_processes.py. Source: https://ipyparallel.readthedocs.io/en/latest/tutorial/direct.html.
"""

import ast
import contextlib
import faulthandler
import io
import linecache
import multiprocessing
import os
import signal
import sys
import traceback
import warnings

from IPython import get_ipython
from IPython.lib.pretty import pretty

from mpdemo.world import launch
from mpdemo.world.gpus import ON_THE_CPU
from mpdemo.world.processes import child_environment

STACK_SIGNAL = signal.SIGUSR2  # on which a rank writes its stack into a file, also while it waits outside Python
GROUP_TIMEOUT = 3600.0  # s; above every cell's time-out, so that the cell reports first
group = None  # the process group's context of this rank: open as long as the process lives
output = None  # the file that gets what cells print: the kernel reads it also while the rank waits for ever


def main():
    """Run ipyparallel's controller or one of its engines: ``python -m mpdemo.notebook.ranks_engine engine ...``.

    The process ends with the kernel, however that ends, and does not inherit an enclosing Slurm job's variables.
    """
    launch.prepare_signals()
    environment = child_environment() | ON_THE_CPU  # gloo, which sends nothing between GPUs
    del environment[launch.PARENT]
    os.environ.clear()
    os.environ.update(environment)
    if sys.argv.pop(1) == "engine":
        from ipyparallel.engine.app import launch_new_instance
    else:
        from ipyparallel.controller.app import main as launch_new_instance

        # The controller forks a process that watches the engines. It must end with the controller.
        os.environ[launch.PARENT] = str(os.getpid())
        multiprocessing.set_start_method("fork")
        os.register_at_fork(after_in_child=launch.prepare_signals)
    launch_new_instance()


def join(rank, world_size, port, output_file, stack_file) -> int:
    """Join the process group, take one core and define the names that every cell knows; return the process number.

    Parameters
    ----------
    rank, world_size : int
        This rank's number, and how many there are.
    port : int
        Where rank 0 listens, on 127.0.0.1.
    output_file, stack_file : str
        Where cells print, and where `STACK_SIGNAL` writes the stack of every thread.
    """
    from mpdemo.world.cores import claim_cores
    from mpdemo.world.env import World, process_group

    global group, output
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})  # as torchrun does
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the machine's name, which may fail on a laptop
    world = World(rank, world_size, rank, world_size, launcher="torchrun")
    claim_cores(world)
    group = process_group(world, timeout=GROUP_TIMEOUT)
    group.__enter__()
    output = io.TextIOWrapper(io.FileIO(output_file, "w"), encoding="utf-8", write_through=True)
    faulthandler.register(STACK_SIGNAL, file=open(stack_file, "w"), all_threads=True)  # noqa: SIM115
    # PyTorch 2.14 warns of names that are the only ones in older releases, such as reduce_scatter_tensor
    warnings.filterwarnings("ignore", ".*Please use `torch.distributed.*_single`", FutureWarning)
    shell = get_ipython()
    shell.ex("import torch, torch.distributed as dist")
    shell.push({"rank": rank, "world_size": world_size}, interactive=False)
    return os.getpid()


def run_cell(source, filename) -> tuple:
    """Run a cell in this rank's namespace; print the value of a last expression, as a notebook does.

    Parameters
    ----------
    source : str
        Python. Its line 1 is the line of the magic, so that numbers are those that the notebook shows.
    filename : str
        What tracebacks call the cell.

    Returns
    -------
    (str, int) or (None, None)
        The error in one line and the cell's line that raised it; nothing if there was none.
    """
    namespace = get_ipython().user_ns
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    body = ast.parse(source, filename).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(compile(ast.Module(body, []), filename, "exec"), namespace)
            value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace) if last else None
            if value is not None:
                print(pretty(value))
        except BaseException as error:
            message = traceback.format_exception_only(error)[0].strip().splitlines()[0]
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
            return message, lines[-1] if lines else None
    return None, None


if __name__ == "__main__":
    main()
