"""Say what is waited for: on the page of a notebook once that takes long, and for a command on the terminal.

`mpdemo.notebook.page` sets `page` where there is one. What is shown goes away when the wait ends, so that no saved
notebook keeps it.
"""

import sys
import threading
import time
from contextlib import contextmanager

AFTER = 10.0  # s; a shorter wait needs no line
POLL = 0.25  # s
page = None  # a function that shows a text in place of the one before, or None


@contextmanager
def waiting_for(what, printed=str):
    """While the block lasts, show what ``printed()`` returns and, in time, a line with what ``what()`` returns.

    A thread does it, since what waits may not come back to Python code before its end.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(ended, what, printed), daemon=True) if page else None
    try:
        if thread:
            thread.start()
        yield
    finally:
        ended.set()
        if thread:
            thread.join()


def _show(ended, what, printed):
    begin, shown = time.monotonic(), ""
    while not ended.wait(POLL):
        seconds = time.monotonic() - begin
        text = printed() + (f"waiting for {what()}, {seconds:.0f} s so far" if seconds > AFTER else "")
        if text != shown:
            page(text)
            shown = text
    if shown:
        page("")


class Progress:
    """A line on a terminal that says what a command is doing, and is gone at the end; nothing in a pipe or a file."""

    def __enter__(self):
        self.stream = sys.stderr  # which a reader's code cannot replace meanwhile
        self.is_seen = self.stream.isatty()
        return self

    def __call__(self, text):
        """Show a text in place of the one before."""
        if self.is_seen:
            print(f"\r\x1b[K{text}", end="", file=self.stream, flush=True)

    def __exit__(self, *error):
        self("")
