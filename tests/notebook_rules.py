"""The house rules of the notebooks, and the traps that nbval does not see, as checks on the saved files.

Every check yields sentences; the traps are explained where they are checked.
"""

import re
import statistics
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

NBVAL_TAGS = {"nbval-ignore-output", "nbval-skip", "raises-exception"}
COURSE_TAGS = {"exercise", "solution", "check"}
MOST_LINES, MEDIAN_LINES = 19, 6  # of a code cell
WIDEST = 104  # characters of a line of code that JupyterLab shows in a window of 1280 pixels
MEDIAN_WORDS = 60  # of prose between two code cells
MOST_BYTES = 300_000  # of one output
WIDGET = "application/vnd.jupyter.widget-view+json"

MACHINE = re.compile(r"/(home|Users)/\w|/(root|tmp|work|farm|scratch)/|\b0x[0-9a-f]{6,}")
BANNED = {
    r"\b(clear_output|update_display)\b": "nbval cannot compare it; display once, or use `await follow(job)`",
    r"\b(subprocess|multiprocessing|os\.system|os\.fork|mp\.spawn)\b": (
        "a child of the kernel outlives it when it is killed; submit a job instead"
    ),
    r"\bpyplot\b": "figures come from mpdemo.notebook.plots, without global state",
    r"#\s*(NBVAL|PYTEST)_": "say it with a tag; a mistyped comment is ignored without a word",
}


def lint(notebook, folder) -> list:
    """Return what is wrong with a notebook that lies in `folder`, a sentence each."""
    problems = list(_whole(notebook))
    for number, cell in enumerate(notebook.cells):
        checks = CODE_CHECKS if cell.cell_type == "code" else [_links]
        for check in checks:
            problems += [f"cell {number} ({cell.get('id')}): {said}" for said in check(cell, folder)]
    return problems


def tags(cell) -> set:
    """Return the cell's tags."""
    return set(cell.metadata.get("tags", []))


def skipped(cell) -> bool:
    """Return whether the cell is never run by a test."""
    return "nbval-skip" in tags(cell)


def _whole(notebook):
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.startswith("# "):
        yield "does not begin with a title and the goal"
    solutions = first.source.startswith("# Solutions")
    if not solutions and not any(_has_picture(cell) for cell in notebook.cells[:5]):
        yield "has no picture in its first five cells"
    if "widgets" in notebook.metadata:
        yield "saves widget state, which breaks GitHub's view of it"
    ids = [cell.get("id", "") for cell in notebook.cells]
    if len(set(ids)) < len(ids):
        yield "has two cells with the same id"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    lines = [len(cell.source.splitlines()) for cell in code]
    if (words := _prose(notebook)) and statistics.median(words) >= MEDIAN_WORDS:
        yield f"has a median of {statistics.median(words):.0f} words between two code cells; at most {MEDIAN_WORDS - 1}"
    if lines and statistics.median(lines) > MEDIAN_LINES:
        yield f"has a median of {statistics.median(lines)} lines a code cell; at most {MEDIAN_LINES}"
    if not solutions and not any(re.search(r"^\s*assert\b", cell.source, re.M) for cell in code):
        yield "asserts nothing of what it claims"
    # Never executed means never compared, whatever the cell prints.
    counts = [cell.execution_count for cell in code if not skipped(cell)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"was not executed from top to bottom: {counts}"


def _prose(notebook) -> list:
    """Return the number of words between each two code cells; hints are collapsed, diagrams are pictures."""
    words, texts = [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            texts += "\n" + re.sub(r"```mermaid.*?```|<details>.*?</details>", "", cell.source, flags=re.S)
        elif texts:
            words, texts = [*words, len(texts.split())], ""
    return words


def _has_picture(cell) -> bool:
    if cell.cell_type != "code":
        return "![" in cell.source or "```mermaid" in cell.source
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def _source(cell, folder):
    lines = cell.source.splitlines()
    if not cell.source.strip():
        yield "is empty"
    if len(lines) > MOST_LINES:
        yield f"has {len(lines)} lines; at most {MOST_LINES}"
    yield from _wide(lines)
    if cell.source.rstrip().endswith(";"):
        yield "ends with ';', which hides an output; display nothing instead"
    # A failed !command passes; an unknown magic stops the cell and passes.
    transformed = TransformerManager().transform_cell(re.sub(OWN_MAGICS, "", cell.source))
    if transformed.count("get_ipython()") > cell.source.count("get_ipython()"):
        yield "uses ! or %: a command that fails, or a magic that is not there, would pass"
    for pattern, why in BANNED.items():
        if (match := re.search(pattern, cell.source)) and "raises-exception" not in tags(cell):
            yield f"uses {match.group()!r}: {why}"
    if match := MACHINE.search(cell.source):
        yield f"names a path of one machine: {match.group()!r}"


def _wide(lines):
    for line in lines:
        if len(line) > WIDEST:
            yield f"has a line of {len(line)} characters; at most {WIDEST}: {line.strip()[:60]}..."


def _tags(cell, folder):
    # A mistyped tag is ignored without a word.
    for tag in sorted(tags(cell) - NBVAL_TAGS - COURSE_TAGS):
        yield f"has the unknown tag {tag!r}; known: {', '.join(sorted(NBVAL_TAGS | COURSE_TAGS))}"
    if tags(cell) >= {"raises-exception", "nbval-ignore-output"}:
        yield "is tagged raises-exception and nbval-ignore-output: which exception it raises is then not compared"
    if "solution" in tags(cell):
        if not cell.source.startswith("# Solution - click to open"):
            yield "is a solution and does not begin with '# Solution - click to open'"
        if not cell.metadata.get("jupyter", {}).get("source_hidden"):
            yield "is a solution and not collapsed (metadata jupyter.source_hidden)"


def _outputs(cell, folder):
    raised = any(output.output_type == "error" for output in cell.outputs)
    if raised and "raises-exception" not in tags(cell):
        yield "ended with an error"
    # The tag on a cell that raises nothing passes.
    if "raises-exception" in tags(cell) and not raised and not skipped(cell):
        yield "is tagged raises-exception and raised nothing"
    for output in cell.outputs:
        yield from _output(output)


def _output(output):
    data = output.get("data", {})
    if WIDGET in data:
        yield "saved a widget, which nobody can see without the kernel"
    if output.get("name") == "stderr":
        yield f"printed to stderr: {output.text.strip()[:80]!r}"
    words = " ".join(
        [output.get("text", ""), output.get("evalue", "")] + [str(data.get(f"text/{form}", "")) for form in FORMS]
    )
    if match := MACHINE.search(words):
        yield f"saved text of one machine: {match.group()!r}"
    if shown := re.search(r"```(?:python|bash)\n(.*?)```", str(data.get("text/markdown", "")), re.S):
        yield from _wide(shown[1].splitlines())
    if re.search(r"<script|(src|href)=[\"']?(https?:)?//", str(data.get("text/html", ""))):
        yield "saved HTML that runs a script or loads from elsewhere"
    if len(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])]))) > MOST_BYTES:
        yield f"has an output of more than {MOST_BYTES // 1000} kB"


OWN_MAGICS = r"\A%%(task|ranks)\b.*\n"  # these name what was wrong, in the cell's output
FORMS = ("plain", "html", "markdown")


def _links(cell, folder):
    """Links to files go to files; a picture from elsewhere would be a request to elsewhere."""
    for picture, target in re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)[^)]*\)", cell.source):
        if re.match(r"https?:|mailto:", target):
            if picture:
                yield f"loads a picture from elsewhere: {target}"
        elif not target.startswith(("#", "attachment:")) and not (Path(folder) / target.partition("#")[0]).exists():
            yield f"links to {target}, which is not there"
    if match := MACHINE.search(cell.source):
        yield f"names a path of one machine: {match.group()!r}"


CODE_CHECKS = [_source, _tags, _outputs]
