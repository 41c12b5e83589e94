"""The rules of a sitting, a notebook about one question: what is capped is what a reader must take in.

Its number has the part of the course and the place in it. The rules of notebook_rules.py hold for solutions as well.
"""

import re
from statistics import median

PARTS = {"1": "Start", "2": "DDP", "3": "Cut the model", "4": "Split what is stored, split a layer"}
PARTS |= {"5": "On a cluster", "6": "When it breaks", "7": "Decide", "8": "Your own"}
OWN_WORK = "8"  # this part is the reader's own work: an hour each
PATHS = "main", "elective"
MOST_IDEAS, IN_A_SECTION = 35, 7
TEXT, TEXT_MEDIAN = 80, 50  # words of a text cell
FRAME = 100  # words of the first one, which plans and offers a shortcut, and of the last one, which sums up
CODE, CODE_MEDIAN, WHOLE = 12, 6, 20  # lines of a code cell, and of a task, a class or a saved program
MOST_WORDS, MOST_MINUTES, WITH_EXERCISES = 2_600, 45, 80
NAME = 16  # characters, which JupyterLab's file list shows
TURN = re.compile(r"\*\*Your turn [\d.]+\*\*\s*\(([^)]*)\)")
# minutes by kind: to predict or decide, to write a mechanism, anything else
MECHANISM, PREDICT, SMALL = 25, 4, 10
FENCED = re.compile(r"```.*?```|<details>.*?</details>|<!--.*?-->", re.S)
SAVES = re.compile(r"^%%task|^%%watch|^class \w|^    class \w|\.write_text\(|\"\"\"$|'''$", re.M)
OURS = re.compile(r"^from mpdemo[\w.]* import \(?([^)\n]+)", re.M)
DEFINED = re.compile(r"^(?:def|class) (\w+)", re.M)
NEEDED = re.compile(r"\bYou need (.*?)\.(?:\s|$)", re.S)
SPOKEN = re.compile(r"`(?:\w+\.)?(--[\w-]+|\w+)[^`]*`")


def words(cell) -> int:
    """Count the words of a text cell, without diagrams and hints."""
    return len(FENCED.sub(" ", cell.source).split())


def lines(cell) -> int:
    """Count the lines of a code cell that hold code."""
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def rows(cell) -> int:
    """Count the rows that a cell's outputs show, a picture as none."""
    count = 0
    for output in cell.outputs:
        data = output.get("data", {})
        html = str(data.get("text/html", ""))
        shown = str(data.get("text/markdown", data.get("text/plain", ""))).splitlines()
        count += len(output.get("text", "").splitlines())
        count += html.count("<tr") if html else 0 if "image/png" in data else len(shown)
    return count


def minutes(notebook) -> int:
    """Return how long a sitting takes without exercises, by the rule that the page for trainers states."""
    text, code = _apart(notebook)
    seconds = 0.6 * sum(map(words, text)) + sum(2 * lines(cell) + rows(cell) for cell in code)
    return round((seconds + notebook.metadata.mpdemo.get("seconds", 0)) / 60)


def minutes_of_exercises(notebook) -> int:
    """Return how long the exercises take, by what each asks for."""
    kinds = [
        kind
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for kind in TURN.findall(cell.source)
    ]
    return sum(
        MECHANISM if "mechanism" in kind else PREDICT if "predict" in kind or "decide" in kind else SMALL
        for kind in kinds
    )


def _apart(notebook):
    """Return the text cells and the code cells that are no exercise."""
    turns = [
        bool(re.search(r"Your turn \d|^%%task|\bcheck\(\"", cell.source, re.M)) for cell in notebook.cells
    ]
    cells = [cell for cell, turn in zip(notebook.cells, turns, strict=True) if not turn]
    return [c for c in cells if c.cell_type == "markdown"], [c for c in cells if c.cell_type == "code"]


def breaches(notebook, path):
    """Yield a sentence for each rule of sittings that a notebook breaks."""
    number, about = path.name[:2], notebook.metadata.mpdemo
    if len(path.stem) > NAME:
        yield f"its name has {len(path.stem)} characters; at most {NAME}"
    if about.get("path") not in PATHS:
        yield f"its metadata's path is {about.get('path')!r}, not {' or '.join(PATHS)}"
    said = NEEDED.search(notebook.cells[0].source)
    lacking = set(re.findall(r"\b\d\d\b", said[1]) if said else ()) - {*about.get("prerequisites", ())}
    if lacking:
        yield f"its opening needs {', '.join(sorted(lacking))}, and the prerequisites of its metadata don't"
    for sentence in re.split(r"(?<=[.?!])\s", notebook.cells[0].source):
        if re.search(r"\bgo\s+on\b", sentence, re.I) and not re.search(r"\brun\b", sentence, re.I):
            yield "its opening lets the reader go on at a section without running the cells that it needs"
    yield from _ideas(notebook)
    yield from _sizes(notebook)
    yield from _early(notebook)
    alone, beside = minutes(notebook), minutes_of_exercises(notebook)
    if number[0] != OWN_WORK and alone > MOST_MINUTES:
        yield f"takes {alone} minutes without its exercises; at most {MOST_MINUTES}"
    if number[0] != OWN_WORK and alone + beside > WITH_EXERCISES:
        yield f"takes {alone + beside} minutes with its exercises; at most {WITH_EXERCISES}"


def _ideas(notebook):
    """Yield what is wrong with the ideas of the metadata: one per cell, in the order of the text."""
    ideas = [list(idea) for idea in notebook.metadata.mpdemo.get("ideas", [])]
    places = {cell.id: place for place, cell in enumerate(notebook.cells)}
    if not ideas:
        yield "its metadata has no ideas: [cell id, one line], in the order of the text"
    if unknown := [cell for cell, _ in ideas if cell not in places]:
        yield f"has ideas of cells that are not there: {', '.join(unknown)}"
        return
    found = [places[cell] for cell, _ in ideas]
    if found != sorted(set(found)):
        yield "has ideas that are not in the order of the text, or two of one cell"
    if len(ideas) > MOST_IDEAS:
        yield f"has {len(ideas)} ideas; at most {MOST_IDEAS}"
    heads = [place for place, cell in enumerate(notebook.cells) if re.match(r"## ", cell.source)]
    for begin, end in zip([0, *heads], [*heads, len(notebook.cells)], strict=True):
        if (count := sum(begin <= place < end for place in found)) > IN_A_SECTION:
            yield f"has {count} ideas between cells {begin} and {end}; at most {IN_A_SECTION} in a section"


def _sizes(notebook):
    """Yield the cells that are too long, and what is long on the whole."""
    text, code = ([c for c in notebook.cells if c.cell_type == kind] for kind in ("markdown", "code"))
    for place, cell in enumerate(notebook.cells):
        room = FRAME if cell in (text[0], text[-1]) else TEXT
        if cell.cell_type == "markdown" and words(cell) > room:
            yield f"cell {place} ({cell.id}): has {words(cell)} words; at most {room}"
        most = WHOLE if SAVES.search(cell.source) else CODE
        if cell.cell_type == "code" and lines(cell) > most:
            yield f"cell {place} ({cell.id}): has {lines(cell)} lines; at most {most}"
    if (middle := median(map(words, text))) > TEXT_MEDIAN:
        yield f"its text cells have {middle:g} words in the middle; at most {TEXT_MEDIAN}"
    if (middle := median(map(lines, code))) > CODE_MEDIAN:
        yield f"its code cells have {middle:g} lines in the middle; at most {CODE_MEDIAN}"
    if (count := sum(map(words, text))) > MOST_WORDS:
        yield f"has {count} words; at most {MOST_WORDS}"


def _early(notebook):
    """Yield the names and flags of ours that a text says before the cell that shows them.

    The text right before that cell may say them, and so may one with a link to the glossary. A cell that only imports
    a name doesn't show it.
    """
    cells = notebook.cells
    code = [place for place, cell in enumerate(cells) if cell.cell_type == "code"]
    used = {place: OURS.sub("", cells[place].source) for place in code}
    ours = {name for place in code for name in DEFINED.findall(cells[place].source)}
    imports = [names for place in code for names in OURS.findall(cells[place].source)]
    ours |= {name for names in imports for name in re.findall(r"\w+", names)}
    said = {}
    for place, cell in enumerate(cells):
        if cell.cell_type == "markdown" and "glossary.md#" not in cell.source:
            for name in SPOKEN.findall(FENCED.sub(" ", cell.source)):
                said.setdefault(name, place)
    for name, place in said.items():
        slurms = any(f"#SBATCH {name}" in used[at] for at in code)
        if name in ours or (name.startswith("--") and not slurms):
            shown = next(
                (at for at in code if re.search(rf"(?<![\w-]){re.escape(name)}\b", used[at])), None
            )
            if shown is not None and any(place < between < shown for between in code):
                yield f"cell {place} ({cells[place].id}): says {name} before cell {shown}, which shows it"
