"""Jobs of programs/worker.py, for the tests that submit them; and a bounded wait for what becomes of them."""

import time
from pathlib import Path

from mpdemo.jobs import JobSpec

PROGRAMS = Path(__file__).parent / "programs"


def spec(*action, out="runs/toy", program="worker.py", **changes):
    command = (str(PROGRAMS / program), out, *map(str, action))
    return JobSpec(**({"name": "toy", "command": command, "out": out} | changes))


def until(condition, seconds=60):
    """Wait for a condition, bounded."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
