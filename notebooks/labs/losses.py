"""Train with a script in a job, always anew, and read the losses that it prints. Used by notebooks 31 and 45 to 48."""

import re
import shutil

from mpdemo.notebook.course import run
from mpdemo.paths import root


def losses_of(script, flags, processes, name, of="step"):
    """Train with a script of notebooks/scripts; return what it prints as the loss of each tenth step, or epoch."""
    command = f"notebooks/scripts/{script} {flags} --checkpoint runs/{name}/train"
    return losses_in(trained(command, processes, name), of)


def trained(command, processes, name, fails=False) -> str:
    """Start a script with torchrun, without what an earlier run has left in its folder; return what it prints."""
    shutil.rmtree(root() / "runs" / name, ignore_errors=True)  # which it would find, or resume
    command = f"torchrun --standalone --nproc-per-node={processes} {command}"
    return run(command, name=name, oversubscribe=processes > 2).output(fails=fails)


def losses_in(text, of="step") -> list[float]:
    """Return the losses that a script has printed."""
    return [float(loss) for loss in re.findall(rf"{of} \d+: loss ([\d.]+)", text)]
