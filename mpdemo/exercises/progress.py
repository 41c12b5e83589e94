"""Which exercises were answered right: a list in ``work/``, which ``python -m mpdemo class`` shows to a trainer."""

import json
from contextlib import suppress
from pathlib import Path

from mpdemo.paths import root

FILE = Path("work", "right.json")


def right_answers(folder) -> list[str]:
    """Return the numbers of the exercises that were right in a project's folder, in their order."""
    try:
        return sorted(json.loads((folder / FILE).read_text()), key=lambda number: [*map(int, number.split("."))])
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def note_right(number):
    """Remember that an exercise was answered right; where nothing can be written, nothing is lost but this."""
    file = root() / FILE
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(sorted({*right_answers(root()), number})) + "\n")
        part.replace(file)
