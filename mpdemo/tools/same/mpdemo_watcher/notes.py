"""What a rank notes: one line of JSON each, written at once, so that a killed rank leaves its notes as well."""

import functools
import json
import os
import sys
import time
from types import SimpleNamespace

ORDER = {}  # what is run, how much of it, and where the notes are written


# Where this rank is, and what it has noted in its round: from a forward pass to the next one after a step.
# Numbers: steps, epochs (how often a loader has begun), how deep in hooks, modules and backward passes it is, passes
# so far, terms of the losses, draws by row, steps of schedulers, calls that others make, the optimizer that stepped.
COUNTS = "steps epoch inside depth backward backwards terms draws scheduled made optimizer last_rate begun"
# Whether the round has begun, a step lies in a backward pass, a wrapper was entered, the learning rate rises, a
# scheduler has still to act, a loader has given a batch.
FLAGS = "open early entered rising waiting loaded"
# Optimizers that step; the hashes of the batch's rows, of the running call's, of all calls' and of those without
# training; targets of a replay; backward passes; learning rates; of the rows their numbers, and the same by columns.
LISTS = "stepping batch row rows eval_rows targets parts rates values columns"
now = SimpleNamespace(
    **dict.fromkeys(COUNTS.split(), 0),
    **dict.fromkeys(FLAGS.split(), False),
    **{name: [] for name in LISTS.split()},
    **{name: {} for name in ("weights", "gradients", "averaged")},  # sketches
    **{name: set() for name in ("stepped", "seen_rates", "whole")},  # parameters; rates; loaders
    read_from=(None, 0),  # of which loader's samples its last batch is, in which pass over them
    **dict.fromkeys(("iterator", "states")),  # over the loader; of the random numbers
    sent="",
    where="",
    drawing="draws",  # lines of the last collective and step; what is drawn
)
now.update = vars(now).update


def note(kind, **what):
    os.write(ORDER["fd"], (json.dumps({"kind": kind, **what}) + "\n").encode())


@functools.cache
def note_once(kind, name):
    """Write a note the first time."""
    note(kind, name=name)


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
