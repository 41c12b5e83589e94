"""Repairs for nbval 0.11.0 (its last release is of March 2024): a green cell means what it says.

Beside them each cell's seconds are noted, in the file that `MPDEMO_CELL_SECONDS` names, and a notebook in which a
cell failed is kept as it was executed, in the folder `MPDEMO_FAILED`. Each repair is a few lines and is tried against
the real nbval, with and without the repair, in tests/test_notebooks_nbval.py.
"""

import os
import signal
import tempfile
import time
import uuid
from queue import Empty

import nbformat
import nbval.kernel
import nbval.plugin

KernelManager = nbval.kernel.KernelManager
start_new_kernel = nbval.kernel.start_new_kernel
runtest = nbval.plugin.IPyNbCell.runtest

POLL = 2.0  # s between two looks whether the kernel still lives


def manager_of_a_kernel_with_files(**options):
    """A port may be taken after it was chosen and before the kernel listens: let its channels be files."""
    return KernelManager(
        transport="ipc",
        ip=f"{tempfile.gettempdir()}/kernel-{uuid.uuid4().hex[:8]}",  # a socket's path: at most 107 letters
        **options,
    )


def start_kernel_that_captures_children(*args, **options):
    """A kernel that sees PYTEST_CURRENT_TEST loses what child processes print."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    options["env"] = kept | {"NBVAL": "1", "NO_COLOR": "1", "TQDM_DISABLE": "1"}
    return start_new_kernel(*args, **options)


def execute_like_a_front_end(self, cell_input, allow_stdin=None):
    """With store_history=False a trailing ';' hides no output, and `_` and `In` are missing."""
    return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)


def await_reply_of_a_live_kernel(self, msg_id, timeout=None):
    """A dead kernel never replies: say so at once, and do not wait for the cell's time limit."""
    end = time.monotonic() + (timeout or float("inf"))
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise Empty
        try:
            message = self.get_message(stream="shell", timeout=min(POLL, left))
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died while it ran this cell") from None
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            self.last_status = message["content"]["status"]
            return


def run_and_believe_the_reply(self):
    """Fail a cell that an unknown magic stopped: it sends a message on stderr and no error."""
    begin = time.monotonic()
    try:
        runtest(self)
        status = getattr(self.parent.kernel, "last_status", "ok")
        raised = any(output.output_type == "error" for output in self.test_outputs or [])
        if status == "error" and not raised:
            self.raise_cell_error("the cell stopped early without a traceback: an unknown magic?")
    except Exception:
        keep(self)
        raise
    finally:
        note(self, time.monotonic() - begin)


def note(cell, seconds):
    """Append a line: seconds, notebook, cell's number among the code cells."""
    if file := os.environ.get("MPDEMO_CELL_SECONDS"):
        with open(file, "a") as notes:
            notes.write(f"{seconds:.1f} {cell.parent.path.name} cell {cell.cell_num}\n")


def keep(cell):
    """Save the notebook with what this cell and those that failed before it have really printed."""
    if folder := os.environ.get("MPDEMO_FAILED"):
        cell.cell.outputs = cell.test_outputs or []
        nbformat.write(cell.parent.nb, f"{folder}/{cell.parent.path.name}")


def pytest_configure(config):
    """Let SIGTERM end the run as Ctrl+C does, which shuts the kernel down with all that it has started."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))


nbval.kernel.KernelManager = manager_of_a_kernel_with_files
nbval.kernel.start_new_kernel = start_kernel_that_captures_children
nbval.kernel.RunningKernel.execute_cell_input = execute_like_a_front_end
nbval.kernel.RunningKernel.await_reply = await_reply_of_a_live_kernel
nbval.plugin.IPyNbCell.runtest = run_and_believe_the_reply
