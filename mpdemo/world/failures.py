"""What a process that ends in an error prints, and which of several failed ones was the cause."""

import signal
import sys
import traceback

from mpdemo.errors import UserError


def report(error, world, started_by_parent):
    """Print on stderr why this process ends; a parent prints the one line itself, so only a traceback is added."""
    rank = f"rank {world.rank} of {world.world_size}" if world else "a rank"
    if isinstance(error, UserError):
        line = f"mpdemo: error: {error}"
    elif lost_a_peer(error):
        line = f"mpdemo: {rank} lost another rank and ends"
    else:
        line = f"mpdemo: {rank} failed: {type(error).__name__}: {error}"
        traceback.print_exception(error)
    if not started_by_parent:
        print(line, file=sys.stderr)


def lost_a_peer(error) -> bool:
    """Whether an error only reports that another rank is gone, so that it is not this rank's own.

    Python's own BrokenPipeError is none: nobody reads what this process prints, as behind ``| head``.
    """
    messages = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    own = isinstance(error, BrokenPipeError) or "BrokenPipeError" in str(error)
    return not own and any(message in str(error) for message in messages)


def first_failure(failures):
    """Return the rank that failed by itself, not because another rank was gone, and its failure."""

    def cause_first(rank):
        failure = failures[rank]
        ended_by_torchrun = failure.exitcode == -signal.SIGTERM
        return lost_a_peer(failure.message), ended_by_torchrun, failure.timestamp

    rank = min(failures, key=cause_first)
    return rank, failures[rank]


def read_message(failure) -> str:
    """Return the error message of a failed rank, in one line."""
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    lines = str(message).strip().splitlines()
    if lines and failure.exitcode > 0:
        return lines[0].rstrip(":")
    return f"ended by signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
