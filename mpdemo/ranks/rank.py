"""What each process of `mpdemo.ranks` does: join the process group, then run what the kernel sends until that ends."""

import ast
import contextlib
import faulthandler
import linecache
import os
import re
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

# a rank then writes its stack into its log, even while it waits outside Python
STACK_SIGNAL = signal.SIGUSR2
GROUP_TIMEOUT = 3600.0  # s; longer than any cell, so that the cell reports first


def main(folder, per_node, group):
    """Be a rank, as one of `per_node` on its node: its stdin is the pipe through which programs come."""
    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_node = min(per_node, world_size - number // per_node * per_node)
    os.environ |= {"LOCAL_RANK": str(number % per_node), "LOCAL_WORLD_SIZE": str(on_node)}
    pipe = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output, log = (open(Path(folder, f"{name}{number}"), "a", buffering=1) for name in ("output", "log"))  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(STACK_SIGNAL, file=log, all_threads=True)
    names = begin(number, world_size, group)
    with contextlib.suppress(EOFError, OSError):  # the kernel has ended
        pipe.send((os.getpid(), None, []))
        while True:
            parts, seconds, show = pipe.recv()
            # ends a rank stuck in C code
            faulthandler.dump_traceback_later(seconds + 60, exit=True, file=log)
            answer = run(parts, names, output, show)
            output.flush()  # a line that has no end yet belongs to this cell, not to the next one
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)
    os._exit(0)


def begin(rank, world_size, group) -> dict:
    """Take one core, join the process group, and return the names that every program knows."""
    import torch
    import torch.distributed as dist

    from mpdemo.world.env import World, claim_cores

    claim_cores(World(rank, world_size, rank, world_size))
    if group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))
    # PyTorch 2.14 warns of names that are the only ones in older releases, such as reduce_scatter_tensor
    warnings.filterwarnings("ignore", ".*Please use `torch.distributed.*_single`", FutureWarning)
    program = sys.modules["__main__"] = ModuleType("__main__")
    vars(program).update(torch=torch, dist=dist, rank=rank, world_size=world_size)
    return vars(program)


def run(parts, names, output, show) -> tuple:
    """Run texts in one namespace; return the last value (printed if `show`), the error or None, and its frames."""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            for source, filename in parts:
                value = execute(source, filename, names)
            if show and value is not None:
                print(repr(value))
            return None if show else value, None, []
        except BaseException as error:
            return None, *describe(error, [filename for _, filename in parts])


def execute(source, filename, names):
    """Run a text; return the value of a last expression, unless a semicolon follows."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    body = ast.parse(source, filename).body
    last = (
        body.pop()
        if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";")
        else None
    )
    exec(compile(ast.Module(body, []), filename, "exec"), names)
    return eval(compile(ast.Expression(last.value), filename, "eval"), names) if last else None


def describe(error, filenames) -> tuple:
    """Return an error in one line, and the frames of these files that it went through."""
    if isinstance(error, SyntaxError) and error.filename in filenames:
        return f"SyntaxError: {error.msg}", [(error.filename, error.lineno)]
    text = traceback.format_exception_only(error)[0].strip()
    message = re.sub(r"\n +(?=[a-z])", " ", text).splitlines()[0]  # PyTorch breaks some sentences in two
    frames = traceback.extract_tb(error.__traceback__)
    return message, [(frame.filename, frame.lineno) for frame in frames if frame.filename in filenames]
