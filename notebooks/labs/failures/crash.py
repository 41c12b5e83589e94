"""Small programs that break: a cell becomes a script, torchrun starts it in two processes, and we read its log.

    %%torchrun shapes             save the cell as runs/60_shapes.py, run it, and say how it ended
    log_of("shapes")              its log, with short paths
    box(log)                      torchrun's report at the end of it
    box(log, "rank", "exitcode")  of each process only these rows
    with errors_of_processes():   of what is written to stderr meanwhile, print the errors alone

Taught in notebooks/60_crash.ipynb.
"""

import contextlib
import logging
import multiprocessing
import os
import re
import tempfile

from IPython import get_ipython

from mpdemo.notebook.course import run
from mpdemo.paths import root

TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node=2"
PATHS = re.compile(r'(?<=[ "\[])/\S+?/(?=[\w.-]+/[\w.-]+\.\w+)')
ROW = re.compile(r"  (\w+) +:")
JOBS = {}


def torchrun(name, cell):
    """Save a cell as a script, start it with torchrun, wait for its end."""
    name = name.strip()
    script = root() / "runs" / f"60_{name}.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(cell)
    JOBS[name] = run(f"{TORCHRUN} runs/{script.name}", name=script.stem)
    state = JOBS[name].wait()
    print(f"runs/60_{name}.py: {state}, with {len(log_of(name).splitlines())} lines of log")


def log_of(name) -> str:
    """Return the log of the script of this name, without srun's numbers of tasks and with short paths."""
    return PATHS.sub(".../", re.sub(r"(?m)^0: ", "", JOBS[name].log()))


def box(log, *rows) -> str:
    """Return torchrun's report, the last one in a log; with names of rows, no other rows of the processes."""
    lines = log[log.rindex("Error: \n====") :].rstrip().splitlines()[1:]
    kept = [line for line in lines if not rows or line[:1] != " " or ROW.match(line)]
    return "\n".join(line for line in kept if not rows or line[:1] != " " or ROW.match(line)[1] in rows)


@contextlib.contextmanager
def errors_of_processes():
    """Print only the errors' own lines of what children and PyTorch's C++ write to stderr meanwhile, each once.

    An interrupt ends the children, and says so.
    """
    kept = os.dup(2)
    logging.disable()
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.kill()
                child.join()
            print("Interrupted: the processes were ended.")
        finally:
            logging.disable(logging.NOTSET)
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            print(*sorted({line for line in file if re.match(r"\w+Error: ", line)}), sep="", end="")


if get_ipython():
    get_ipython().register_magic_function(torchrun, "cell")
