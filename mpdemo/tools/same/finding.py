"""What can be found, how it is said, and how far two tensors, or all of them, are from each other."""

import math
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from mpdemo.errors import one_line

DATA = tomllib.loads(Path(__file__).with_name("findings.toml").read_text())
TABLE, BY_NATURE, GIVEN, VERDICTS = (DATA[name] for name in ("found", "by nature", "given", "verdicts"))
TOLERANCE = {"bfloat16": 3e-2, "float16": 5e-3}  # relative; of other dtypes 2e-4


@dataclass
class Finding:
    """One thing that is not as it should be."""

    name: str
    what: str
    where: str = ""  # the line of the reader's files that makes it, where one is known

    def has(self, mark) -> bool:
        """Whether its row in the table has a mark."""
        return TABLE[self.name].get(mark, False)

    def record(self) -> dict:
        """Return it for the JSON file; a script may print anything, and files may have any name."""
        return {name: one_line(text) for name, text in asdict(self).items()} | TABLE[self.name]

    def __str__(self):
        record = self.record()
        record["line"] = f"\n    Line: {record['where']}" * bool(self.where)
        return "  {name}: {what}{line}\n    Remedy: {remedy} ({code}, {section})".format(**record)


def distance(a, b) -> float:
    """Return the relative difference of two numbers."""
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def tolerance(*worlds) -> float:
    """Return what rounding may change, by the least precise dtype seen."""
    return max(TOLERANCE.get(name, 2e-4) for world in worlds for name in world.names("dtype") | {"float32"})


def norm(sketches) -> float:
    """Return the norm of some tensors together."""
    return math.sqrt(sum(values[0] for values in sketches.values()))


def apart(a, b, share=0.1) -> tuple:
    """Return how far the tensors of two sketches are from each other, relative to their norm, and the farthest name.

    A tensor that is small beside the others is measured by a share of them, or rounding would decide.
    """
    total, farthest = max(norm(a), 1e-12), (0.0, "")
    for name in a.keys() & b.keys():
        off = max(abs(a[name][1] - b[name][1]), abs(a[name][2] - b[name][2]))
        relative = off / (math.sqrt(a[name][0]) + share * total)
        if not relative <= farthest[0]:  # it may be no number
            farthest = relative, name
    return farthest


def shown(names) -> str:
    """Return the first names as text."""
    first = ", ".join(list(names)[:4])
    return f"{first} ..." if len(names) > 4 else first
