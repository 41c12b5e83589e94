"""The house rules of the notebooks, and the traps that nbval does not see, as checks on the saved files.

Each check yields sentences; the traps are explained where they are checked.
"""

import re
from html import unescape
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

TAG = "nbval-ignore-output"
# takes long, no later cell needs it, and other tests run its code: left to ``make nightly``
NIGHT = "nightly"
KNOWN = {TAG, NIGHT}  # no others: a mistyped tag is ignored without a word
MOST_LINES = 45  # of a solution; sitting_rules.py allows a reader's own cells fewer
WIDEST = 104  # characters of a line of code that JupyterLab shows in a window of 1280 pixels
MOST_BYTES = 300_000  # of one output
MOST_WORDS = 20  # of an objective
OWN_MAGICS = r"\A%%(task|ranks|watch|torchrun)\b.*\n"  # these name what was wrong, in the cell's output
MACHINE = re.compile(r"/(home|Users)/\w|/(root|tmp|work|farm|scratch)/|\b0x[0-9a-f]{6,}")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r"ms|s|seconds|KiB|MiB|GiB|kB|MB|GB|times"
PAIR = rf"(?:,?\s(?:and|or|to|of the|instead of)\s{NUMBER})?"  # "28 of the 44.6 MiB" are two numbers
MEASURED = re.compile(rf"(?<![\w.,])({NUMBER})(?={PAIR}[\s-]({UNIT})\b)")
PLAN = re.compile(r"\bPlan\s+(?:about\s+)?(\d+)\s+minutes\b")
FENCED = re.compile(r"```.*?```", re.S)
TOLD = re.compile(r"\d|\b(both|half|two|three|four)\b")  # a number, as a diagram may say it, too
DO = "write what a cell shows, or list the number with its source in tests/numbers.toml"
BANNED = {
    r"\b(clear_output|update_display)\b": "nbval cannot compare it; display once, or use `await follow(job)`",
    # not torch.multiprocessing.spawn, whose children end with the kernel
    r"\b(subprocess|(?<!torch\.)(?<!distributed\.elastic\.)multiprocessing|os\.system|os\.fork|mp\.spawn)\b": (
        "a child of the kernel outlives it when it is killed; submit a job instead"
    ),
    r"\bpyplot\b": "figures come from mpdemo.notebook.plots, without global state",
    r"#\s*(NBVAL|PYTEST)_": "say it with a tag; a mistyped comment is ignored without a word",
}


def lint(notebook, folder) -> list:
    """Return what is wrong with a notebook that lies in `folder`, a sentence each."""
    problems = list(_whole(notebook))
    for number, cell in enumerate(notebook.cells):
        said = _code(cell) if cell.cell_type == "code" else _links(cell, Path(folder))
        problems += [f"cell {number} ({cell.get('id')}): {problem}" for problem in said]
    return problems


def unsourced(notebook, listed):
    """Yield a sentence for each number in the prose that nothing in the notebook shows, and that `listed` doesn't name.

    A number has a unit: 96 ms, 7 MiB, 1.5 times. It is looked for in outputs, code cells and quoted messages, where one
    that rounds to it counts as well. Left out are percentages, counts, minutes, hours and words ("twice"). Units aren't
    compared, so a small whole number is nearly always found; what only a picture shows is not.
    """
    shown = {_value(number) for cell in notebook.cells for number in re.findall(NUMBER, _shown(cell))}
    said = set()
    for position, cell in enumerate(notebook.cells):
        prose = (
            re.sub(r"`[^`]*`", " ", FENCED.sub(" ", cell.source)) if cell.cell_type == "markdown" else ""
        )
        for number, unit in MEASURED.findall(prose):
            said.add(f"{number} {unit}")
            half = 0.5 * 10 ** -len(number.partition(".")[2]) + 1e-9  # of the last digit
            found = any(abs(value - _value(number)) <= half for value in shown)
            if not found and f"{number} {unit}" not in listed:
                yield f"cell {position} ({cell.get('id')}): says {number} {unit}, which no cell shows: {DO}"
    for number in sorted(set(listed) - said):
        yield f"says {number} nowhere any more: delete its line in tests/numbers.toml"


def undescribed(notebook, number):
    """Yield what is missing in the metadata that the documents are made from, or wrong; `number` is the notebook's."""
    about = notebook.metadata.get("mpdemo", {})
    if missing := {"objectives", "prerequisites", "scripts", "minutes", "seconds"} - set(about):
        yield f"its metadata lacks {', '.join(sorted(missing))} under 'mpdemo': see tests/documents.py"
        return
    if not 2 <= len(about.objectives) <= 4:
        yield f"its metadata has {len(about.objectives)} objectives; 2 to 4"
    for said in about.objectives:
        if said[:1].isupper() or said.endswith(".") or len(said.split()) > MOST_WORDS:
            yield f"the objective {said!r} doesn't complete 'After this notebook you can ...' in {MOST_WORDS} words"
    if late := [before for before in about.prerequisites if before >= number]:
        yield f"builds on {', '.join(late)}, which comes later"


def misplanned(notebook, minutes):
    """Yield a sentence if the opening plans another time than `minutes`, which it may round to five."""
    plans = PLAN.findall(notebook.cells[0].source)
    if len(plans) != 1 or abs(int(plans[0]) - minutes) > 2:
        said = " and ".join(plans) or "no"
        yield f"its opening plans {said} minutes, and its metadata says {minutes} min: run python tests/documents.py"


def replanned(source, minutes) -> str:
    """Return an opening that plans `minutes`, rounded to five."""
    return PLAN.sub(lambda plan: plan[0].replace(plan[1], str(5 * round(minutes / 5))), source)


def _shown(cell) -> str:
    """Return what a cell shows beside prose: code, outputs in words, and fenced blocks."""
    if cell.cell_type == "markdown":
        return " ".join(FENCED.findall(cell.source))
    data = [content for output in cell.outputs for content in output.get("data", {}).items()]
    words = [re.sub(r"<[^>]+>", " ", str(content)) for form, content in data if form.startswith("text/")]
    return " ".join([cell.source, *(output.get("text", "") for output in cell.outputs), *words])


def _numbers(text) -> list:
    """Return the numbers of a text, or of HTML as a reader sees it."""
    return sorted(re.findall(NUMBER, unescape(re.sub(r"<[^>]+>", " ", text))))


def _value(number) -> float:
    return float(number.replace(",", ""))


def tags(cell) -> set:
    """Return the cell's tags."""
    return set(cell.metadata.get("tags", []))


def _whole(notebook):
    first = notebook.cells[0].source if notebook.cells else ""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not first.startswith("# "):
        yield "does not begin with a title and the goal"
    if not first.startswith("# Solutions"):
        if not any(map(_has_picture, notebook.cells[:5])):
            yield "has no picture in its first five cells"
        if not any(re.search(r"^\s*assert\b", cell.source, re.M) for cell in code):
            yield "asserts nothing of what it claims"


def _has_picture(cell) -> bool:
    forms = [output.get("data", {}) for output in cell.get("outputs", [])]
    shown = any("image/png" in form or "data:image/png" in form.get("text/html", "") for form in forms)
    return shown or (cell.cell_type == "markdown" and bool(re.search(r"!\[|```mermaid", cell.source)))


def _code(cell):
    lines = cell.source.splitlines()
    if not cell.source.strip():
        yield "is empty"
    if len(lines) > MOST_LINES:
        yield f"has {len(lines)} lines; at most {MOST_LINES}"
    if cell.source.rstrip().endswith(";"):
        yield "ends with ';', which hides an output; display nothing instead"
    transformed = TransformerManager().transform_cell(re.sub(OWN_MAGICS, "", cell.source))
    if transformed.count("get_ipython()") > cell.source.count("get_ipython()"):
        yield "uses ! or %: a command that fails, or a magic that is not there, would pass"
    for pattern, why in BANNED.items():
        if match := re.search(pattern, cell.source):
            yield f"uses {match.group()!r}: {why}"
    if unknown := tags(cell) - KNOWN:
        yield f"has the unknown tag {', '.join(map(repr, sorted(unknown)))}; known: {', '.join(sorted(KNOWN))}"
    if any(output.output_type == "error" for output in cell.outputs):
        yield "ended with an error"
    yield from _text(cell.source, lines)
    for output in cell.outputs:
        yield from _output(output)


def _output(output):
    data = {form: str(content) for form, content in output.get("data", {}).items()}
    shown = re.findall(r"```(?:python|bash)\n(.*?)```", data.get("text/markdown", ""), re.S)
    words = [output.get("text", ""), output.get("evalue", "")]
    words += [data.get(f"text/{form}", "") for form in ("plain", "html", "markdown")]
    yield from _text(" ".join(words), [line for text in shown for line in text.splitlines()])
    alts = re.findall(r"<img\b(?:[^>]*? alt=\"([^\"]*)\")?", data.get("text/html", ""))
    for alt in alts + [output.get("metadata", {}).get("image/png", {}).get("alt", "")] * (
        "image/png" in data
    ):
        if not TOLD.search(alt):
            yield f"has a picture whose alt text tells no number: {alt!r}"
    if "<table" in (table := data.get("text/html", "")) and _numbers(table) != _numbers(
        data.get("text/plain", "")
    ):
        yield "shows other numbers as HTML than as plain text: they are of two runs; save both again"
    if "application/vnd.jupyter.widget-view+json" in data:
        yield "saved a widget, which shows nothing without the kernel"
    if output.get("name") == "stderr":
        yield f"printed to stderr: {output.text.strip()[:80]!r}"
    if re.search(r"<script|(src|href)=[\"']?(https?:)?//", data.get("text/html", "")):
        yield "saved HTML that runs a script or loads from elsewhere"
    if (
        len(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])])))
        > MOST_BYTES
    ):
        yield f"has an output of more than {MOST_BYTES // 1000} kB"


def _text(text, lines=()):
    if match := MACHINE.search(text):
        yield f"names a path or an address of one machine: {match.group()!r}"
    for line in lines:
        if len(line) > WIDEST:
            yield f"has a line of {len(line)} characters; at most {WIDEST}: {line.strip()[:60]}..."


def _links(cell, folder):
    yield from _text(cell.source)
    for picture, target in re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)[^)]*\)", cell.source):
        if re.match(r"https?:|mailto:", target):
            if picture:  # would be a request to elsewhere
                yield f"loads a picture from elsewhere: {target}"
        elif (
            not target.startswith(("#", "attachment:")) and not (folder / target.partition("#")[0]).exists()
        ):
            yield f"links to {target}, which is not there"
