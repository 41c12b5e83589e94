"""What a rank notes: one line of JSON each, written at once, so that a killed rank leaves its notes as well."""

import functools
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

ORDER = {}  # what is run, how much of it, and where the notes are written


@dataclass
class Now:
    """Where this rank is, and what it has noted since its last step."""

    steps: int = 0
    read_from: tuple = (None, 0)  # of which loader's samples its last batch is, in which pass over them
    epoch: int = 0  # how often any loader has begun
    iterator: Any = None
    loaded: bool = False  # whether a loader has given a batch
    batch: list = field(default_factory=list)  # the hashes of its rows
    row: list = field(default_factory=list)  # the rows of the model's call that runs
    rows: list = field(default_factory=list)
    # of training, if a backward pass follows and no others were seen
    eval_rows: list = field(default_factory=list)
    targets: list = field(default_factory=list)
    depth: int = 0  # of calls of modules
    backward: int = 0  # of backward passes
    parts: list = field(default_factory=list)  # the backward passes since the last step
    synced: bool | None = None
    terms: int = 0
    states: Any = None  # of the random numbers, to see whether one is drawn
    draws: int = 0
    drawing: str = "draws"  # what random numbers are for, as --without names it
    weights: dict = field(default_factory=dict)
    gradients: dict = field(default_factory=dict)
    largest: dict = field(default_factory=dict)
    rates: set = field(default_factory=set)
    scheduled: int = 0
    waiting: bool = False
    made: int = 0  # calls that other ranks have to make, too
    backwards: int = 0  # passes so far
    # sketches of the gradients when the last backward pass was over
    averaged: dict = field(default_factory=dict)
    values: list = field(default_factory=list)  # of the rows: norm and projection of each
    columns: list = field(
        default_factory=list
    )  # the same by second dimension, which is the batch in some models, or without padding
    begun: float = 0.0  # when the script began
    slow: bool = False  # whether it takes too long to look for more state
    whole: set = field(default_factory=set)  # loaders of which the script asks for all batches, one by one

    def update(self, **new):
        """Note several things at once."""
        for name, value in new.items():
            setattr(self, name, value)


now = Now()


def note(kind, **what):
    os.write(ORDER["fd"], (json.dumps({"kind": kind, **what}) + "\n").encode())


@functools.cache
def note_once(kind, name):
    """Write a note the first time."""
    note(kind, name=name)


def number_of(known, thing) -> int:
    """Return a thing's place among those met so far; `known` keeps it alive, so no other gets its id."""
    return known.setdefault(id(thing), (len(known), thing))[0]


def before(owner, name, action):
    """Call an action with the arguments of a function of a module or class, before the function itself."""
    if function := getattr(owner, name, None):

        @functools.wraps(function)
        def called(*args, **options):
            action(*args, **options)
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
