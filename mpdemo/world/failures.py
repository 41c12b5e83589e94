"""What a process that ends in an error says, and which of several failed ones was the cause."""

import signal
import sys
import traceback

from mpdemo.errors import UserError


def report(error, world, started_by_parent):
    """Say on stderr why this process ends. A parent says it in one line itself; only a traceback is left to add."""
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
    """Tell an error that only says that another rank is gone from one that is the rank's own."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return any(sign in str(error) for sign in signs)


def first_failure(failures):
    """The rank that failed of itself, not because a peer was gone: (rank, failure)."""

    def after(item):
        failure = item[1]
        ended_by_torchrun = failure.exitcode == -signal.SIGTERM
        return lost_a_peer(failure.message), ended_by_torchrun, failure.timestamp

    return min(failures.items(), key=after)


def read_message(failure) -> str:
    """What a failed rank said, in one line."""
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    message = str(message).strip().splitlines()
    if message and failure.exitcode > 0:
        return message[0].rstrip(":")
    return f"ended by signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
