"""Write what the notebooks' metadata says into the documents, and compute how many minutes each one takes.

    python tests/documents.py

Every refresh does the same. A notebook's metadata has under `mpdemo` its `objectives`, which complete the sentence
"After this notebook you can ...", the numbers of its `prerequisites`, and `scripts` to read beside it: change these by
hand. The `minutes` are an estimate, by the rule that the page for trainers states; `seconds` are those of its cells
alone, in the run whose outputs are saved.
"""

import re
import sys
from pathlib import Path

import nbformat
from notebook_rules import misplanned, replanned, undescribed

from mpdemo.notebook.check import exercises
from mpdemo.paths import root

COURSE, TRAINERS = root() / "notebooks/README.md", root() / "notebooks/for_trainers.md"
BEGIN, END = "<!-- from the notebooks' metadata -->", "<!-- end of the metadata -->"
# minutes for an exercise, and for one of the notebook whose exercises are stages of a script
EACH, OF_A_STAGE = 8, 20
STAGES = "94"
# a row that ends with the hours of the notebooks it links
DAY = re.compile(r"^(\| \w+ day \|.*\|) [\d.]+ \|$", re.M)


def main(paths=None):
    """Compute the minutes of notebooks, of all by default, and write every file that changes; name it."""
    for path in paths or notebooks():
        notebook = nbformat.read(path, as_version=4)
        if missing := list(undescribed(notebook, path.name[:2])):
            sys.exit(f"{path.name}: {missing[0]}")
        about = notebook.metadata.mpdemo
        about.minutes = minutes(notebook, path.name[:2])
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
    """Return the paths of the course's notebooks."""
    return sorted(root().glob("notebooks/*.ipynb"))


def pages() -> dict[Path, str]:
    """Return the pages as the notebooks' metadata wants them."""
    abouts = {path.stem: nbformat.read(path, as_version=4).metadata.mpdemo for path in notebooks()}
    trainers = in_place(TRAINERS, times_table(abouts))
    return {
        COURSE: in_place(COURSE, course_table(abouts)),
        TRAINERS: DAY.sub(lambda row: with_hours(row, abouts), trainers),
    }


def text_of(notebook) -> str:
    """Return the text of a notebook's file."""
    return nbformat.writes(notebook) + "\n"


def minutes(notebook, number) -> int:
    """Return how long a notebook takes, by the rule that the page for trainers states."""
    words = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    code = [cell.source.splitlines() for cell in notebook.cells if cell.cell_type == "code"]
    lines = sum(bool(line.strip()) for source in code for line in source)
    each = OF_A_STAGE if number == STAGES else EACH
    return round(each * len(exercises(number)) + words / 150 + lines * 4 / 60)


def mistimed(notebook, number):
    """Yield a sentence if the metadata is off by more than a tenth: not every edited sentence needs a new table."""
    told, needed = notebook.metadata.mpdemo.get("minutes", 0), minutes(notebook, number)
    if abs(told - needed) > needed / 10:
        yield f"its metadata says {told} minutes, and it takes {needed}: run python tests/documents.py"


def course_table(abouts) -> str:
    """Return the table of notebooks for learners."""
    rows = [
        "| notebook | after it you can | builds on | minutes | read beside it |",
        "|---|---|---|---|---|",
    ]
    for name, about in abouts.items():
        before = ", ".join(about.prerequisites) or "-"
        beside = ", ".join(f"[{Path(script).name}]({script})" for script in about.scripts)
        said = "; ".join(about.objectives)
        rows.append(f"| [{name}]({name}.ipynb) | {said} | {before} | {about.minutes} | {beside} |")
    return "\n".join(rows)


def times_table(abouts) -> str:
    """Return the table for trainers of how long each notebook takes."""
    rows = ["| notebook | exercises | working time | its cells alone |", "|---|---|---|---|"]
    for name, about in abouts.items():
        times = f"{about.minutes} min | {about.seconds} s"
        rows.append(f"| [{name}]({name}.ipynb) | {len(exercises(name[:2]))} | {times} |")
    return "\n".join(rows)


def with_hours(row, abouts) -> str:
    """Return the row of a day with the hours of the notebooks that it links."""
    names = re.findall(r"\((\w+)\.ipynb\)", row[1])
    return f"{row[1]} {sum(abouts[name].minutes for name in names) / 60:.1f} |"


def in_place(path, table) -> str:
    """Return a page with a table between its two comments."""
    before, _, rest = path.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
