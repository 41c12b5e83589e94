"""Processes that run cells (``%%ranks``) and readers' programs (``%%task``), in one process group on this machine.

They are forked from a server that imports PyTorch once (about 370 MB) and computes nothing, since a fork after a
computation could hang. They end with this process, however it ends. What each of them does: rank.py.
"""

import re

from mpdemo.ranks.group import CellFailed, Processes
from mpdemo.world.processes import lost_a_peer

__all__ = ["CellFailed", "Processes", "run_program"]
PATIENCE = 1.0  # s for which other ranks may still report, once a rank of a program has failed
PROGRAM, TEST = "<program>", "<test>"  # what tracebacks call the reader's text, and ours


def run_program(source, test, world_size=2, timeout=20.0, group=True, files=None, per_node=None) -> list:
    """Run a reader's program and then a test of it in fresh processes; return a tuple for each of them.

    Both texts run in one namespace, which knows torch, dist, rank and world_size; the time limit is for both together.
    Without a `group` the program makes its own. `files` (name -> text or bytes) lie in the working folder, which all
    ranks share and which goes away afterwards. With `per_node` the ranks are told that so many share a node.

    The tuple is (what the rank printed, the value of the test's last expression, the error or None). The error is one
    line: the message of the test's assert, or the program's error with its line, or where each rank waits. A rank that
    only waited for a failed one, or lost it, has neither. `CellFailed` is raised where the processes do not start.
    """
    parts = [(source, PROGRAM), (test, TEST)]
    ranks = Processes(world_size, group, files or {}, per_node)
    try:
        ranks.run(parts, range(world_size), timeout, PATIENCE)
        errors = _errors(ranks, parts) or _waiting(ranks, parts, timeout)
        values = [
            ranks.answers[number][0] if number in ranks.answers else None for number in range(world_size)
        ]
        return [
            (rank.printed(), values[number], errors.get(number)) for number, rank in enumerate(ranks.ranks)
        ]
    finally:
        ranks.stop()


def _errors(ranks, parts) -> dict:
    """Return the error of each rank that failed by itself."""
    errors = {
        number: _in_words(number, *answer[1:]) for number, answer in ranks.answers.items() if answer[1]
    }
    if ended := ranks.first_to_end():
        errors.setdefault(ended[0], f"Rank {ended[0]} failed: {ended[1]}")
    return {number: error for number, error in errors.items() if not lost_a_peer(error)} or errors


def _in_words(number, message, frames) -> str:
    """Return a rank's error: only the message where an assert of the test raised it."""
    if frames and frames[-1][0] == TEST:
        if message.startswith("AssertionError: "):
            return message.removeprefix("AssertionError: ")
        if unknown := re.match(r"NameError: name '(\w+)' is not defined", message):
            return f"The program defines no {unknown[1]}."
    lines = [line for filename, line in frames if filename == PROGRAM]
    return f"Rank {number} failed: {message}" + (f" (line {lines[-1]})" if lines else "")


def _waiting(ranks, parts, timeout) -> dict:
    """Return one text, which says where all ranks are, for each rank that is not done."""
    waiting = [number for number in range(len(ranks.ranks)) if number not in ranks.answers]
    places = ranks.places(range(len(ranks.ranks)), parts) if waiting else ""
    return dict.fromkeys(waiting, f"After {timeout:g} s {places}.")
