"""What can be found, how it is said, and how far two tensors, or all of them, are from each other."""

import math
import operator
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from mpdemo.errors import one_line

DATA = tomllib.loads(Path(__file__).with_name("findings.toml").read_text())
TABLE, BY_NATURE, VERDICTS = (DATA[name] for name in ("found", "by nature", "verdicts"))
TOLERANCE = {"bfloat16": 3e-2, "float16": 5e-3}  # relative; of other dtypes 2e-4
EQUAL = 1e-5  # relative: ranks or runs that do the same arithmetic
SHARE = 0.1  # of the norm of all tensors: what a small one is measured by


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
        return "  {name}: {what}{line}\n    Remedy: {remedy}".format(**record)


def parted(found, strict) -> dict:
    """Return which findings make it another training, and which are about what is printed or written alone."""
    harmless = [finding for finding in found if finding.has("note") and not strict]
    return {"findings": [finding for finding in found if finding not in harmless], "harmless": harmless}


def distance(a, b) -> float:
    """Return the relative difference of two numbers."""
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def tolerance(*worlds) -> float:
    """Return what rounding may change, by the least precise dtype seen."""
    return max(TOLERANCE.get(name, 2e-4) for world in worlds for name in world.names("dtype") | {"float32"})


def norm(sketches) -> float:
    """Return the norm of some tensors together."""
    return math.sqrt(sum(values[0] for values in sketches.values()))


def far(a, b) -> dict:
    """Return how far each tensor of a sketch is from that of another, relative to its norm.

    A tensor that is small beside the others is measured by a share of them, or rounding would decide; one that is
    missing is zero.
    """
    beside = SHARE * max(norm(a), 1e-12)
    return {
        name: gap(row, b.get(name) or [0.0] * len(row)) / (math.sqrt(row[0]) + beside)
        for name, row in a.items()
    }


def gap(a, b) -> float:
    """Return the largest difference of two tensors' projections."""
    return max(abs(x - y) for x, y in zip(a[1:-1], b[1:-1], strict=True))


def apart(a, b) -> tuple:
    """Return how far the tensors of two sketches are from each other at most, and the name; no number is farthest."""
    found = ((off if off == off else math.inf, name) for name, off in far(a, b).items())
    return max(found, default=(0.0, ""))


def less(a, b) -> dict:
    """Return some sketches less others, without norms; one that is missing is zero."""
    return {
        name: [
            0.0,
            *(x - y for x, y in zip(row[1:-1], (b.get(name) or [0.0] * len(row))[1:-1], strict=True)),
            "",
        ]
        for name, row in a.items()
    }


def fit(target, basis) -> tuple:
    """Return the weights by which some sketches make up a target, if any do, and what share of it is left."""
    goal, *columns = (
        [x for name, row in target.items() for x in (of.get(name) or [0.0] * len(row))[1:-1]]
        for of in (target, *basis)
    )
    size = math.sqrt(sum(x * x for x in goal))
    if len(goal) < len(basis) + 3 or not size or not math.isfinite(size) or not all(map(any, columns)):
        return [], 1.0
    rows = [[sum(map(operator.mul, one, other)) for other in (*columns, goal)] for one in columns]
    for k, row in enumerate(rows):
        row[k] *= 1 + 1e-9  # ranks with the same gradient count alike
    weights = solved(rows)
    made = [sum(map(operator.mul, weights, values)) for values in zip(*columns, strict=True)]
    return weights, math.dist(made, goal) / size


def solved(rows) -> list:
    """Return the solution of the equations of least squares, by elimination: their diagonal stays positive."""
    for k in range(len(rows)):
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for other, row in enumerate(rows):
            if other != k:
                rows[other] = [x - row[k] * y for x, y in zip(row, rows[k], strict=True)]
    return [row[-1] for row in rows]


def numbers(values) -> str:
    """Return some numbers as text."""
    return " and ".join(f"{value:.6g}" for value in values)


def shown(names) -> str:
    """Return the first names as text."""
    first = ", ".join(list(names)[:4])
    return f"{first} ..." if len(names) > 4 else first
