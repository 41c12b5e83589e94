"""What a rank notes: one line of JSON each, written at once, so that a killed rank leaves its notes as well."""

import functools
import json
import os
import sys
import time

ORDER = {}  # what is run, how much of it, and where the notes are written
now = {"pass": (None, 0), "parts": [], "synced": None, "terms": 0, "steps": 0}  # since the last step


def note(kind, **what):
    """Write a note."""
    os.write(ORDER["fd"], (json.dumps({"kind": kind, **what}) + "\n").encode())


@functools.cache
def note_once(kind, name):
    """Write a note the first time."""
    note(kind, name=name)


def number_of(known, thing) -> int:
    """Return a thing's place in a list of those met so far; the list keeps it alive, so no other gets its id."""
    place = next((k for k, other in enumerate(known) if other is thing), len(known))
    if place == len(known):
        known.append(thing)
    return place


def whole(tensor):
    """Return a tensor's own values, all of them where it is split over ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def finish():
    """End this rank, for enough was seen: wait until all others are as far, and `serve.py` ends them together.

    In a job nobody else does: it ends itself, at the latest when the others have had their time.
    """
    ORDER["at_end"]()
    sys.stdout.flush()
    open(f"{ORDER['notes']}/{ORDER['rank']}.end", "w").close()
    until = time.monotonic() + ORDER["limit"] if ORDER["in_job"] else float("inf")
    while time.monotonic() < until and not (ORDER["in_job"] and all(map(has_ended, range(ORDER["processes"])))):
        time.sleep(0.2)
    os._exit(0)


def has_ended(rank) -> bool:
    """Whether a rank is as far, or gone."""
    return any(os.path.exists(f"{ORDER['notes']}/{rank}.{ending}") for ending in ("end", "status"))
