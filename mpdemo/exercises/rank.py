"""What one rank of an exercise does, in a process that `mpdemo.exercises.run` forked."""

import contextlib
import faulthandler
import importlib
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

from mpdemo.errors import error_line
from mpdemo.world.launch import PARENT, prepare_signals

FOLDER = "MPDEMO_EXERCISE_FOLDER"  # names the folder of a check to its ranks


def folder() -> Path:
    """Return where a rank may write: a folder that goes with the check, however it ends."""
    return Path(os.environ[FOLDER])


class Program(ModuleType):
    """What the reader's program defines, as attributes; its functions look their names up in `vars` of it."""

    def __getattr__(self, name):
        raise AttributeError(f"the program defines no {name}")


def substitute(module, name, replacement, program):
    """Put a function in the place of a module's, also under the names by which a program has imported it."""
    function = getattr(module, name)
    for names in (vars(module), vars(program)):
        names |= {key: replacement for key, value in names.items() if value is function}


def main(path, driver, folder, root, environment):
    """Run the program; end this process with status 0 or 1.

    It writes ``rank0.ready`` (for rank 0) once PyTorch is loaded, then ``rank0.json``, or ``rank0.error`` with the
    error and its line. A failed rank must not wait for its peers, so nothing is cleaned up.

    Parameters
    ----------
    path, driver, folder, root : str
        The program; ``MODULE:DRIVER`` or nothing; where to write; the project's root.
    environment : dict
        Replaces the environment of the server that this process was forked from.
    """
    rank = environment["RANK"]
    log = os.open(Path(folder, f"rank{rank}.log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment | {PARENT: str(os.getppid()), FOLDER: folder})
    prepare_signals()
    threading.Thread(target=_end_with_kernel, args=(folder,), daemon=True).start()
    os.chdir(root)
    sys.path.insert(0, root)
    status = 1
    try:
        status = _run_rank(path, driver, Path(folder), rank)
    finally:
        sys.stdout.flush()
        os._exit(status)


def _end_with_kernel(folder):
    """End this process with the one that asked for it, and remove the folder, which nobody else does then.

    The server, the parent of this process, lives as long as a rank does.
    """
    wait([multiprocessing.parent_process().sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _run_rank(path, driver, folder, rank) -> int:
    import torch

    torch.set_num_threads(1)
    stack = os.open(folder / f"rank{rank}.stack", os.O_CREAT | os.O_WRONLY)
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
    (folder / f"rank{rank}.ready").touch()
    try:
        result = _drive(path, driver) if driver else _run(path)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == 2:
            return 1  # argparse has said why, in the log
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = getattr(error, "lineno", None) or (own[-1] if own else None)
        where = f" (line {line})" if line else ""
        (folder / f"rank{rank}.error").write_text(f"{error_line(error)}{where}")
        return 1
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    return 0


def _drive(path, driver):
    import torch.distributed as dist

    module, _, name = driver.partition(":")
    program = sys.modules["exercise"] = Program("exercise")
    program.__file__ = path
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(program))
    dist.init_process_group("gloo")
    result = getattr(importlib.import_module(module), name)(program, dist.get_rank(), dist.get_world_size())
    dist.barrier()  # PyTorch 2.15 may abort where the end follows the last collective at once
    dist.destroy_process_group()
    return result


def _run(path):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(path, run_name="__main__")
    return output.getvalue()
