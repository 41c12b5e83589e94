"""Times as Slurm writes them and as one says them.

No library reads ``D-HH``, or takes a bare ``90`` for minutes.
"""

import re


def seconds(text) -> int:
    """Return the seconds in ``MM``, ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM`` or ``D-HH:MM:SS``.

    Raises
    ------
    ValueError
        The text is none of these.

    Examples
    --------
    >>> seconds("00:10:00"), seconds("90"), seconds("1:30"), seconds("1-12"), seconds("1-00:00:10")
    (600, 5400, 90, 129600, 86410)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if not match:
        raise ValueError("is no time; allowed: HH:MM:SS or D-HH:MM:SS, as in 00:10:00")
    days, *fields = match.groups()
    numbers = [int(field) for field in fields if field is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # without days and hours, the first number is the minutes
    hours, minutes, rest = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def limit(text) -> int:
    """Return the seconds of a time limit; `ValueError` also for 0, which Slurm takes for no limit at all."""
    total = seconds(text)
    if total == 0:
        raise ValueError("is no time at all; give at least one second, as in 00:10:00")
    return total


def duration(seconds) -> str:
    """Return a time in the unit that one would say: ``42 s``, ``10 min``, ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
