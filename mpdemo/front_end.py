"""A notebook's page in JupyterLab or the like: whether there is one, and what it shows while a cell waits.

What is shown goes away when the wait ends, so that no saved notebook keeps it.
"""

import os
import sys
import threading
import time
from contextlib import contextmanager

AFTER = 10.0  # s; a shorter wait needs no line
POLL = 0.25  # s
shown = {}  # the number of the cell that runs -> the output that shows its text


def has_front_end() -> bool:
    """Return whether a widget can be seen and used: in a kernel of Jupyter's server or of VS Code, not in a test."""
    if "IPython" not in sys.modules or {"PYTEST_CURRENT_TEST", "NBVAL"} & os.environ.keys():
        return False
    shell = sys.modules["IPython"].get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return False
    return "JPY_SESSION_NAME" in os.environ or "__vsc_ipynb_file__" in shell.user_ns


@contextmanager
def waiting_for(what, printed=str):
    """While the block lasts, show what ``printed()`` returns and, in time, a line with what ``what()`` returns.

    A thread does it, since what waits may not come back to Python code before its end.
    """
    ended = threading.Event()
    thread = (
        threading.Thread(target=_show, args=(ended, what, printed), daemon=True)
        if has_front_end()
        else None
    )
    try:
        if thread:
            thread.start()
        yield
    finally:
        ended.set()
        if thread:
            thread.join()


def _show(ended, what, printed):
    begin, last = time.monotonic(), ""
    while not ended.wait(POLL):
        seconds = time.monotonic() - begin
        text = printed() + (f"waiting for {what()}, {seconds:.0f} s so far" if seconds > AFTER else "")
        if text != last:
            _show_text(text)
            last = text
    if last:
        _show_text("")


def _show_text(text):
    """Show a text in the output of the cell that runs, in place of the one before."""
    from IPython import get_ipython
    from IPython.display import display

    cell = get_ipython().execution_count
    data = {"text/plain": text}
    if cell in shown:
        shown[cell].update(data, raw=True)
    else:
        shown.clear()
        shown[cell] = display(data, raw=True, display_id=True)
