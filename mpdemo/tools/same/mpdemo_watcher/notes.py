"""What a rank notes: one line of JSON each, written at once, so that a killed rank leaves its notes as well.

With the line of the reader's files that runs: asked at the moment of a call, since no log tells it later.
"""

import functools
import json
import linecache
import os
import re
import sys
import time
import traceback
from types import SimpleNamespace

ORDER = {}  # what is run, how much of it, and where the notes are written
LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python")
HERE = os.path.dirname(os.path.abspath(__file__))


def new_round() -> dict:
    """Return what is noted of a step, empty: it lasts from a forward pass to the next one after an update."""
    return dict(
        weights={},  # sketches, as the three below; none before the round has begun
        gradients={},  # that the step uses
        averaged={},  # as the last backward pass has left them
        rows=[],  # for each call of a model the hashes of its rows
        parts=[],  # backward passes
        rates=[],  # of the optimizers
        scheduled=0,  # steps of schedulers
        early=False,  # whether the step lies in a backward pass
        entered=False,  # whether a wrapper was called
        sent="",  # the line of the last collective before the first backward pass
    )


# where this rank is
now = SimpleNamespace(
    **new_round(),
    steps=0,
    backwards=0,  # passes so far
    epoch=0,  # how often a loader has begun
    iterator=None,  # over the loader
    trained_on=None,  # the iterator whose batches a backward pass has used
    # the last batch of numbered samples: its loader, the pass over it, and its number there
    read_from=(None, 0, 0),
    whole=set(),  # loaders whose epochs are not cut
    inside=0,  # how deep in hooks, modules and backward passes it is
    depth=0,
    backward=0,
    stepping=[],  # optimizers that step
    stepped=set(),  # parameters that were updated in this round
    optimizer=0,  # the number of the one that has stepped last, and its line
    where="",
    seen_rates=set(),
    last_rate=float("inf"),
    rising=False,  # the learning rate
    waiting=False,  # for a scheduler that has still to act
    states=None,  # of the random numbers, while they are watched
    drawing="draws",  # what for
    chances=0,  # random numbers outside of a model
    draws=0,  # by row
    batch=[],  # the hashes of the batch's rows, of the running call's, and of calls without training
    row=[],
    eval_rows=[],
)
now.update = vars(now).update


def note(kind, **what):
    os.write(ORDER["fd"], (json.dumps({"kind": kind, **what}) + "\n").encode())


@functools.cache
def note_once(kind, name, **more):
    """Write a note the first time."""
    note(kind, name=name, **more)


def number_of(known, thing) -> int:
    """Return a thing's place among those met so far; `known` keeps it alive, so no other gets its id."""
    return known.setdefault(id(thing), (len(known), thing))[0]


def guarded(action):
    """Let a hook that fails say so, and leave the script alone."""

    @functools.wraps(action)
    def tried(*args, **options):
        now.inside += 1
        try:
            return action(*args, **options)
        except PermissionError:  # of a file outside the run's folder
            raise
        except Exception as error:
            note_once("not examined", f"{action.__name__} ({type(error).__name__})")
        finally:
            now.inside -= 1

    return tried


def before(owner, name, action):
    """Call an action with the arguments of a function of a module or class, before the function itself."""
    if function := getattr(owner, name, None):
        act = guarded(action)

        @functools.wraps(function)
        def called(*args, **options):
            act(*args, **options)
            return function(*args, **options)

        setattr(owner, name, called)


def note_line(owner, name, kind):
    """Note the lines that call a function of a module or class."""
    before(owner, name, lambda *_, **__: note_once(kind, here()))


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


def of_error(error) -> dict:
    """Return what an error says, and the innermost line of the reader's files that it came through.

    A syntax error and the errors of a loader's workers have their lines in their text, the latter with a traceback.
    """
    text = "".join(traceback.format_exception_only(error))
    passed = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    passed += re.findall(r'File "(.+)", line (\d+)', text)
    found = [f"{place}:{line}" for file, line in passed if (place := own(file))]
    last = text.rpartition("Traceback (most recent call last):\n")[2]
    said = [line for line in last.splitlines() if not line.startswith("  ")]
    return {"said": " ".join(said), "where": found[-1] if found else ""}


def takes_one() -> bool:
    """Whether the reader's own line asks for the next batch with `next`, so that it counts on all of them."""
    frame = next(frames(), None)
    return bool(frame) and "next(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def calling(name, of=""):
    """Write down a call that the other ranks have to make, too, before it is made: it may never return."""
    note("call", name=name, of=of, where=here())


def has_ended(status):
    """Leave the exit status of this rank where the others look for it."""
    with open(f"{ORDER['notes']}/{ORDER['rank']}.status", "w") as file:
        file.write(str(status))


def finish():
    """End this rank, for enough was seen: as soon as all others are as far, which may wait for a message from it."""
    ORDER["at_end"]()
    note_once("cut", "after this step")
    sys.stdout.flush()
    has_ended(0)
    files = [f"{ORDER['notes']}/{rank}.status" for rank in range(ORDER["processes"])]
    until = time.monotonic() + 2 * ORDER["limit"]  # `serve.world` kills this rank before
    while time.monotonic() < until and not all(map(os.path.exists, files)):
        time.sleep(0.05)
    os._exit(0)
