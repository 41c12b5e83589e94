"""What tools say of the public bugs in tests/same/zoo and of their right twins: one table, and a line for each bug.

    python3 -m venv tools && tools/bin/pip install torch-preflight
    python tests/bench/scoreboard.py tools/bin/torch-preflight

A tool has found a bug if it reports something of the script and not of its right twin; what it reports of the twin is
a false alarm. It has named the bug if the report matches the expression in the script's first lines. `same` runs the
script as it is; a tool that only reads it gets the text of each twin, without the other's branches.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import test_same

NEAR = 3  # lines around the marked one: where a call is missing, its neighbours are named


class Twin(ast.NodeTransformer):
    """Leaves one twin of a script: `fixed` becomes a constant, and branches that are never taken go."""

    def __init__(self, fixed):
        self.fixed = fixed

    def visit_Name(self, node):
        loaded = node.id == "fixed" and isinstance(node.ctx, ast.Load)
        return ast.copy_location(ast.Constant(self.fixed), node) if loaded else node

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        value = node.operand.value if isinstance(node.operand, ast.Constant) else None
        return ast.Constant(not value) if isinstance(value, bool) else node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        known = [part.value for part in node.values if isinstance(part, ast.Constant)]
        left = [part for part in node.values if not isinstance(part, ast.Constant)]
        if decides in known or not left:
            return ast.Constant(decides if decides in known else not decides)
        return left[0] if len(left) == 1 else ast.BoolOp(node.op, left)

    def taken(self, node):
        self.generic_visit(node)
        known = isinstance(node.test, ast.Constant)
        return (node.body if node.test.value else node.orelse) if known else node

    visit_If = visit_IfExp = taken


def of_same(name, fixed, folder) -> list:
    """Return what `same` reports: names and lines."""
    record = Path(folder, "found.json")
    words = ["--resume"] * name.startswith("resume_") + ["--timeout", "20", "--json", str(record)]
    command = [sys.executable, "-m", "mpdemo", "same", *words, "--", f"{name}.py", *["--fixed"] * fixed]
    done = subprocess.run(command, cwd=test_same.ZOO, capture_output=True, text=True)
    if not record.exists():
        return [(done.stderr.strip(), 0)]
    (world,) = json.loads(record.read_text())["worlds"]
    found = [*world["findings"], *world["harmless"]]
    record.unlink()
    return [(row["name"], int(row.get("where", "").rpartition(":")[2] or 0)) for row in found]


def of_preflight(program, name, fixed, folder) -> list:
    """Return the errors and warnings of torch-preflight."""
    tree = Twin(fixed).visit(ast.parse((test_same.ZOO / f"{name}.py").read_text()))
    Path(folder, "train.py").write_text(ast.unparse(ast.fix_missing_locations(tree)))
    command = [Path(program).absolute(), "check", "--format", "json", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    rows = json.loads(done.stdout)["diagnostics"]
    return [(f"{row['code']}: {row['message']}", 0) for row in rows if row["severity"] != "note"]


def line_of(name) -> int:
    """Return the number of the line that is marked as wrong."""
    lines = (test_same.ZOO / f"{name}.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith("# fault"))


def score(tool) -> dict:
    """Return what a tool says of each bug: found, named, at its line, a false alarm, and the seconds of one call."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in test_same.BUGS:
            start = time.monotonic()
            said = tool(name, False, folder)
            seconds, right = time.monotonic() - start, tool(name, True, folder)
            new = [row for row in said if row not in right]
            named = [row for row in new if re.search(test_same.named(name), row[0])]
            near = any(abs(line - line_of(name)) <= NEAR for _, line in named)
            rows[name] = (
                bool(new),
                bool(named),
                near,
                bool(right),
                seconds,
                "; ".join(text for text, _ in said),
            )
            print(f"{name:22} {said} {right}", file=sys.stderr, flush=True)
    return rows


def table(heads, rows):
    """Print a table, in Markdown."""
    print(*(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)), sep="\n", end="\n\n")


def main(preflight=None):
    """Score the tools that there are; print the table, then each bug with what `same` says of it."""
    tools = {"`mpdemo same`": of_same}
    if preflight:
        tools["torch-preflight"] = lambda *given: of_preflight(preflight, *given)
    scores = {title: score(tool) for title, tool in tools.items()}
    lines = []
    for title, rows in scores.items():
        *counts, seconds, _ = zip(*rows.values(), strict=True)
        lines.append([title, *(f"{sum(of)} of {len(rows)}" for of in counts), f"{median(seconds):.1f}"])
    print(f"{time.strftime('%Y-%m-%d')}, PyTorch {torch.__version__}:\n")
    table(["tool", "bugs found", "named", "at the line", "right twins condemned", "seconds, median"], lines)
    marks, bugs = {True: "yes", False: "**no**"}, []
    for name, (found, named, *_, said) in scores["`mpdemo same`"].items():
        address = test_same.ABOUT.match((test_same.ZOO / f"{name}.py").read_text())[1]
        place = "/".join(address.split("/")[3:5]) + "#" + address.rpartition("/")[2]
        bugs.append(
            [
                f"[{name}]({name}.py)",
                f"[{place}]({address})",
                marks[found],
                marks[named],
                said or "the same",
            ]
        )
    table(["bug", "reported", "found", "named", "`same` says"], bugs)


if __name__ == "__main__":
    main(*sys.argv[1:])
