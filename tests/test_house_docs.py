"""What the files say of each other is true: links, names of files, commands, notebooks; and no word too much."""

import ast
import re
import tomllib
from collections import Counter

import nbformat
import pytest
from project import files

from mpdemo.__main__ import COMMANDS
from mpdemo.notebook.check import exercises
from mpdemo.paths import root
from mpdemo.settings import RUNGS

FILES = files()
TEXTS = [
    file for file in FILES if file.suffix in {".md", ".py", ".toml", ".cfg", ".sbatch", ".sh", ".yml", ".ipynb", ""}
]
PAGES = [file for file in FILES if file.suffix == ".md"]
# The files with the rules name what they forbid.
RULES = {"tests/test_house_docs.py", "tests/notebook_rules.py", "tests/test_notebooks_rules.py"}
COUNTED = "process|line|thread|node|device|rank|value|stage|file|row|task|second|step|column|GPU|core"
PER = "process|device|node|rank|step|epoch|task|GPU|image|microbatch|stage|rung|job|user|copy|thread|channel"
FORBIDDEN = {
    r"(?<![\w.])/(work|root|farm)/": "a path of one machine",
    r"(?<![\w.])/(home|Users)/\w": "a path of one machine",
    r"(?i)\bissues? #?\d": "the project's files speak of the project, not of how it was made",
    r"(?i)\bhelper [a-c]\b": "the project's files speak of the project, not of how it was made",
    r"\b(TODO|FIXME|XXX)\b": "half-done work is not committed",
    rf"\b(?:one|two|a|an|\d+) (?:{COUNTED})s? an? (?:{PER})\b": "the field writes per: one process per device",
}


def text(file) -> str:
    return (root() / file).read_text(encoding="utf-8")


def words_of(file) -> str:
    """Return a file's text; of a notebook all but its pictures, which are long and say nothing."""
    if file.suffix != ".ipynb":
        return text(file)
    notebook = nbformat.reads(text(file), as_version=4)
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    data = [value for o in outputs for form, value in o.get("data", {}).items() if form.startswith("text/")]
    return "\n".join([cell.source for cell in notebook.cells] + [o.get("text", "") for o in outputs] + data)


def test_no_word_too_much():
    problems = []
    for file in (file for file in TEXTS if file.as_posix() not in RULES):
        for number, line in enumerate(words_of(file).splitlines(), 1):
            whys = [why for pattern, why in FORBIDDEN.items() if re.search(pattern, line)]
            problems += [f"{file}:{number}: {why}: {line.strip()[:100]}" for why in whys]
    assert not problems, "\n".join(problems)


def test_trainers_are_told_how_many_exercises_a_notebook_has():
    rows = re.findall(r"^\| \[(\d\d)_\w+\]\(\S+\) \| (\d+) \| \d+ s \|$", text("notebooks/for_trainers.md"), re.M)
    assert {number: int(count) for number, count in rows} == Counter(number[:2] for number in exercises())


@pytest.mark.parametrize("file", PAGES, ids=str)
def test_links_lead_somewhere(file):
    for target in re.findall(r"\]\(([^)\s]+)\)", text(file)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, heading = target.partition("#")
        place = (root() / file).parent / path if path else root() / file
        assert place.exists(), f"{file} links to {target}"
        if heading and place.suffix == ".md":
            assert heading in headings(place.read_text()), f"{file} links to {target}: no such heading"


def headings(page) -> set:
    """Return the anchors that GitHub makes of a page's headings."""
    lines = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("file", PAGES, ids=str)
def test_names_in_code_quotes_exist(file):
    quoted = re.findall(r"`([^`\n]+)`", text(file))
    for name in quoted:
        if "NAME" in name:  # stands for a name that the reader chooses
            continue
        if re.fullmatch(r"(mpdemo|notebooks|slurm|tests)/[\w./-]*\w/?", name):
            assert (root() / name).exists(), f"{file} names {name}, which is not there"


@pytest.mark.parametrize("file", PAGES, ids=str)
def test_commands_on_the_pages_exist(file):
    page = text(file)
    for command in re.findall(r"\bpython -m mpdemo ([a-z]+)", page):
        assert command in COMMANDS, f"{file}: python -m mpdemo {command}"
    targets = re.findall(r"^([\w.-]+):", text("Makefile"), re.M) if (root() / "Makefile").exists() else []
    for target in re.findall(r"^\s*(?:\$ )?make (\w+)|`make (\w+)`", page, re.M):
        assert max(target) in targets, f"{file}: make {max(target)}"


def test_every_module_and_every_public_class_says_what_it_is():
    silent = []
    for file in (file for file in FILES if file.parts[0] in ("mpdemo", "tests") and file.suffix == ".py"):
        tree = ast.parse(text(file))
        public = [n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
        silent += [f"{file}: {getattr(n, 'name', 'the module')}" for n in [tree, *public] if not ast.get_docstring(n)]
    assert not silent, "no docstring: " + ", ".join(silent)


def test_every_requirement_has_no_upper_bound_but_the_one_that_is_explained():
    project = tomllib.loads(text("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *(r for group in project["optional-dependencies"].values() for r in group)]
    assert [r for r in wanted if re.search(r"==|<", r)] == ["nbval==0.11.0"]


def test_docstrings_name_things_that_exist():
    missing = []
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for file in (file for file in FILES if file.suffix == ".py"):
        for node in (node for node in ast.walk(ast.parse(text(file))) if isinstance(node, documented)):
            words = ast.get_docstring(node) or ""
            names = re.findall(r"\b(?:notebooks/\w+\.ipynb|(?:mpdemo|tests)/[\w/]+\.(?:py|cfg|toml))", words)
            missing += [f"{file}: {name}" for name in names if not (root() / name).exists()]
    assert not missing, "named and not there: " + ", ".join(missing)


def test_the_ladder_on_the_first_page_names_each_rung_its_notebook_and_its_file():
    rows = [line for line in text("README.md").splitlines() if line.startswith("|")]
    rungs = [file.stem for file in FILES if file.match("mpdemo/parallel/*.py")]
    for rung in set(rungs) & set(RUNGS):
        row = [line for line in rows if f"mpdemo/parallel/{rung}.py" in line]
        assert len(row) == 1, f"README.md: one row for {rung}, with mpdemo/parallel/{rung}.py"
        assert re.search(r"notebooks/\w+\.ipynb", row[0]), f"README.md: the row of {rung} links no notebook"
