"""Tells GitHub what `mpdemo same` found: a note at each line, and a table in the summary: ``report.py JSON SCRIPT``.

Where there was nothing to compare, JSON is empty, and JSON.err says why.
"""

import json
import os
import sys
from pathlib import Path

LEVELS = {"findings": "error", "harmless": "warning"}


def escaped(text, more="") -> str:
    """Return a text as the commands of a workflow take it."""
    for sign in "%\r\n" + more:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def note(level, place, title, text):
    """Show a text at a place, such as scripts/train.py:88, of the repository."""
    file, _, line = place.rpartition(":") if ":" in place else (place, "", "1")
    file = os.path.relpath(file, os.environ["GITHUB_WORKSPACE"])
    print(f"::{level} file={escaped(file, ':,')},line={line},title={escaped(title, ':,')}::{escaped(text)}")


def table(record) -> list:
    """Return the summary, in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [f"### `{' '.join(record['script'])}`", "", f"With {versions}:"]
    for world in record["worlds"]:
        lines += ["", f"**{world['processes']} processes: {world['verdict']}**", ""]
        rows = [(level, row) for kind, level in LEVELS.items() for row in world[kind]]
        cells = [["", "finding", "evidence", "line", "remedy"], ["---"] * 5]
        for level, row in rows:
            cells.append(
                [level, f"{row['code']} {row['name']}", row["what"], row.get("where", ""), row["remedy"]]
            )
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells if rows]
        lines += ["", *(f"- {text}" for text in world["notes"])]
    return lines


def main(file, script):
    """Write both."""
    if not (text := Path(file).read_text()):
        said = Path(f"{file}.err").read_text().strip().splitlines() or ["mpdemo same has said nothing"]
        note("error", script, "mpdemo same", said[-1])
        return
    record = json.loads(text)
    for world in record["worlds"]:
        for kind, level in LEVELS.items():
            for row in world[kind]:
                note(
                    level,
                    row.get("where") or script,
                    f"{row['code']} {row['name']}",
                    f"{row['what']}\n{row['remedy']}",
                )
        if world["verdict"] == "unsure":
            title = f"{world['processes']} processes: unsure"
            note("error", script, title, "\n".join(world["notes"]))
    with open(os.environ["GITHUB_STEP_SUMMARY"], "a") as summary:
        print(*table(record), sep="\n", file=summary)


if __name__ == "__main__":
    main(*sys.argv[1:])
