"""A pytest plugin: SIGTERM ends the run as Ctrl+C does, and whatever the run has started ends with it."""

import signal

from mpdemo.world.family import adopt_orphans, end_children

SIGNALLED = []


def interrupt(number, frame):
    """Adopt what workers leave when they end: only now, since tests look for orphans."""
    SIGNALLED.append(number)
    adopt_orphans()
    signal.default_int_handler(number, frame)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        signal.signal(signal.SIGTERM, interrupt)


def pytest_unconfigure(config):
    if SIGNALLED:
        end_children()
