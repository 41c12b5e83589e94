"""Write what the notebooks' metadata says into the documents, and compute how many minutes each one takes.

    python tests/documents.py

Every refresh does the same. A notebook's metadata has under `mpdemo` its `objectives`, which complete the sentence
"After this notebook you can ...", the numbers of its `prerequisites`, and `scripts` to read beside it: change these by
hand. A sitting (sitting_rules.py) also has its `path` and its `ideas`, pairs of a cell's id and a line, in the order of
the text. The `minutes` are an estimate, by the rule that the page for trainers states; `seconds` are those of its cells
alone, in the run whose outputs are saved.
"""

import re
import sys
from pathlib import Path

import nbformat
import sitting_rules
from notebook_rules import misplanned, replanned, undescribed
from sitting_rules import PARTS

from mpdemo.notebook.check import exercises
from mpdemo.paths import root

COURSE, TRAINERS = root() / "notebooks/README.md", root() / "notebooks/for_trainers.md"
FRONT = root() / "README.md"
BEGIN, END = "<!-- from the notebooks' metadata -->", "<!-- end of the metadata -->"
LESSON = 45  # minutes
# a row of a timetable, which links sittings: what it builds on, and its hours or lessons
ROW = re.compile(r"^(\| [\w ,]+ \| \[\d.*\)) \|[^|]*\|([^|]*)\|$", re.M)


def main(paths=None):
    """Compute the minutes of notebooks, of all by default, and write every file that changes; name it."""
    for path in paths or notebooks():
        notebook = nbformat.read(path, as_version=4)
        if missing := list(undescribed(notebook, path.name[:2])):
            sys.exit(f"{path.name}: {missing[0]}")
        about = notebook.metadata.mpdemo
        about.minutes = sitting_rules.minutes(notebook)
        if any(misplanned(notebook, about.minutes)):
            notebook.cells[0].source = replanned(notebook.cells[0].source, about.minutes)
        write(path, text_of(notebook))
    for path, text in pages().items():
        write(path, text)


def write(path, text):
    """Write a file and name it, if it changes."""
    if text != path.read_text():
        path.write_text(text)
        print(f"{path.relative_to(root())}: changed")


def notebooks() -> list:
    """Return the paths of the course's notebooks, in the order in which they are read."""
    return sorted(root().glob("notebooks/*.ipynb"))


def pages() -> dict[Path, str]:
    """Return the pages as the notebooks' metadata wants them."""
    abouts = {}
    for path in notebooks():
        notebook = nbformat.read(path, as_version=4)
        abouts[path.stem] = about = notebook.metadata.mpdemo
        about.title = re.match(r"# (?:\d+\. )?(.*)", notebook.cells[0].source)[1]
        about.exercises = sitting_rules.minutes_of_exercises(notebook)
    trainers = in_place(TRAINERS, times_table(abouts))
    return {
        FRONT: in_place(FRONT, titles_table(abouts)),
        COURSE: in_place(COURSE, course_table(abouts)),
        TRAINERS: ROW.sub(lambda row: with_time(row, abouts), trainers),
    }


def text_of(notebook) -> str:
    """Return the text of a notebook's file."""
    return nbformat.writes(notebook) + "\n"


def mistimed(notebook):
    """Yield a sentence if the metadata is off by more than a tenth: not every edited sentence needs a new table."""
    told, needed = notebook.metadata.mpdemo.get("minutes", 0), sitting_rules.minutes(notebook)
    if abs(told - needed) > needed / 10:
        yield f"its metadata says {told} minutes, and it takes {needed}: run python tests/documents.py"


def course_table(abouts) -> str:
    """Return the tables of notebooks for learners, one for each part."""
    head = "| notebook | path | after it you can | builds on | minutes | read beside it |\n|---|---|---|---|---|---|"

    def row(name, about):
        before = ", ".join(about.prerequisites) or "-"
        beside = ", ".join(f"[{Path(script).name}]({script})" for script in about.scripts) or "-"
        said = "; ".join(about.objectives)
        return f"| {link(name)} | {about.path} | {said} | {before} | {working_time(about)} | {beside} |"

    return in_parts(abouts, head, row)


def titles_table(abouts) -> str:
    """Return the table of the first page: the titles, by part, an elective in italics."""
    rows = {number: (f"**{title}**", []) for number, title in PARTS.items()}
    for name, about in abouts.items():
        said = f"[{name[:2]} {about.title}](notebooks/{name}.ipynb)"
        said = f"*{said}*" if about.path == "elective" else said
        rows[name[0]][1].append(said)
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            *(f"| {part} | {' · '.join(all_of)} |" for part, all_of in rows.values() if all_of),
        ]
    )


def times_table(abouts) -> str:
    """Return the tables for trainers of how long each notebook takes."""
    head = "| notebook | path | exercises | minutes | its cells alone |\n|---|---|---|---|---|"

    def row(name, about):
        number = len(exercises(name[:2]))
        return f"| {link(name)} | {about.path} | {number} | {working_time(about)} | {about.seconds} s |"

    return in_parts(abouts, head, row)


def in_parts(abouts, head, row) -> str:
    """Return a table for each part of the course."""
    tables = []
    for part, title in PARTS.items():
        rows = [row(name, about) for name, about in abouts.items() if name[0] == part]
        tables.append("\n".join([f"### Part {part}. {title}", "", head, *rows, ""]))
    return "\n".join(tables)


def link(name) -> str:
    """Return a link to a notebook."""
    return f"[{name}]({name}.ipynb)"


def working_time(about) -> str:
    """Return the minutes of a notebook, and after a plus sign those of a sitting's exercises."""
    return f"{about.minutes}" + (f" + {about.exercises}" if about.exercises else "")


def with_time(row, abouts) -> str:
    """Return the row of a timetable with what its sittings build on and don't bring, and the time that they take."""
    names = re.findall(r"\((\w+)\.ipynb\)", row[1])
    needs = {number for name in names for number in abouts[name].prerequisites}
    before = sorted(needs - {name[:2] for name in names})
    each = [abouts[name].minutes + abouts[name].exercises for name in names]
    lessons = sum(-(-minutes // LESSON) for minutes in each)
    time = f"{lessons} lessons" if "lessons" in row[2] else f"{sum(each) / 60:.1f} h"
    return f"{row[1]} | {', '.join(before) or '-'} | {time} |"


def in_place(path, table) -> str:
    """Return a page with a table between its two comments."""
    before, _, rest = path.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
