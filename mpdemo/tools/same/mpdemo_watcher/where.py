"""Which line of the reader's files runs: asked at the moment of a call, since no log tells it later."""

import functools
import linecache
import os
import sys

from .notes import ORDER, note, now

LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python")
HERE = os.path.dirname(os.path.abspath(__file__))
MOST = 3000  # calls that are written down, each before it is made


@functools.cache
def own(file) -> str:
    """Return the path of one of the reader's files as they know it, or an empty text."""
    path = os.path.abspath(os.path.join(ORDER["cwd"], file))
    if file.startswith("<") or path.startswith(HERE) or any(part in path for part in LIBRARIES):
        return ""
    for top in (ORDER["cwd"], ORDER["real"]):  # a package that is installed from there is read there
        if path.startswith(top + os.sep):
            return os.path.relpath(path, top)
    return os.path.relpath(path, ORDER["cwd"]) if path.startswith(ORDER["folder"] + os.sep) else ""


def frames():
    """Yield the frames of the reader's files, the innermost first."""
    frame = sys._getframe(1)
    while frame:
        if own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def lines():
    """Yield the lines of the reader's files that run, such as ``train.py:12``, the innermost first."""
    for frame in frames():
        yield f"{own(frame.f_code.co_filename)}:{frame.f_lineno}"


def here() -> str:
    """Return the innermost line of the reader's files that runs."""
    return next(lines(), "")


def of_script() -> str:
    """Return the innermost line of the script itself, for a load or save that a file beside it makes."""
    script = own(sys.argv[0])
    return next((line for line in lines() if line.rpartition(":")[0] == script), here())


def takes_one() -> bool:
    """Whether the reader's own line asks for the next batch with `next`, so that it counts on all of them."""
    frame = next(frames(), None)
    return bool(frame) and "next(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def calling(name, of=""):
    """Write down a call that the other ranks have to make, too, before it is made: it may never return."""
    now.made += 1
    if now.made <= MOST:
        note("call", name=name, of=of, where=here())
