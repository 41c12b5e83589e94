"""Train with a script to take home, in a job, and return the losses that it prints. Used by notebooks 45 to 48."""

import re
import shutil

from mpdemo.notebook.course import run


def losses_of(script, flags, processes, name, of="step"):
    """Train anew with a script of notebooks/scripts; return what it prints as the loss of each tenth step, or epoch."""
    shutil.rmtree(f"../runs/{name}", ignore_errors=True)  # of an earlier run, which it would resume
    command = f"notebooks/scripts/{script} {flags} --checkpoint runs/{name}/train"
    command = f"torchrun --standalone --nproc-per-node={processes} {command}"
    printed = run(command, name=name, oversubscribe=processes > 2).output()
    return [float(loss) for loss in re.findall(rf"{of} \d+: loss ([\d.]+)", printed)]
