"""What the files say of each other is true: links, names of files, commands, words; and no word too much."""

import re
import runpy
import shlex
import tomllib
from collections import Counter

import documents
import nbformat
import pytest
from project import files

from mpdemo.__main__ import COMMANDS
from mpdemo.paths import root
from mpdemo.settings import RUNGS

FILES = files()
NOTEBOOKS = [file for file in FILES if file.match("notebooks/*.ipynb")]
PAGES = [file for file in FILES if file.suffix == ".md"]
# name it
RULES = {f"tests/{name}.py" for name in ("test_house_docs", "notebook_rules", "test_notebooks_rules")}
COUNTED = "process|line|thread|node|device|rank|value|stage|file|row|task|second|step|column|GPU|core"
PER = (
    "process|device|node|rank|step|epoch|task|GPU|image|microbatch|stage|rung|job|user|copy|thread|channel"
)
FORBIDDEN = {
    r"(?<![\w.])/(work|root|farm)/": "a path of one machine",
    r"(?<![\w.])/(home|Users)/\w": "a path of one machine",
    r"(?i)\bissues? #?\d|\bhelper [a-c]\b": "the project's files speak of the project, not of how it was made",
    r"\brm (?:-\w+ )*[^\s`]*\*(?!\.(?:out|err)\b)": "a pattern may match what a reader wants to keep: name the folder",
    r"\b(TODO|FIXME|XXX)\b": "half-done work is not committed",
    rf"\b(?:one|two|a|an|\d+) (?:{COUNTED})s? an? (?:{PER})\b": "the field writes per: one process per device",
}
# a row's first anchor, and its word
GLOSSARY = re.compile(r'^\| <a id="([^"]+)"></a>(?:<a id="[^"]+"></a>)*([^|]+?) \| [^|]+ \| \[\d\d\]', re.M)
# start it
JUPYTERLAB, TRUST = r"-m jupyterlab\b|`jupyter lab\b|^\$ jupyter lab\b", "jupyter trust notebooks/*.ipynb"
BASE64 = r"[A-Za-z0-9+/=]{200,}"
NOT_PROSE = re.compile(r"```.*?```|`[^`]*`|<[^>]+>|\]\([^)]*\)|^#[^\n]*$|https?://\S+", re.S | re.M)


def text(file) -> str:
    return (root() / file).read_text(encoding="utf-8")


def test_no_word_too_much():
    """Pictures, which say nothing, are left out of notebooks."""
    kinds = {".md", ".py", ".toml", ".cfg", ".sbatch", ".sh", ".yml", ".ipynb", ""}
    problems = []
    for file in (file for file in FILES if file.suffix in kinds and file.as_posix() not in RULES):
        for number, line in enumerate(re.sub(BASE64, "", text(file)).splitlines(), 1):
            whys = [why for pattern, why in FORBIDDEN.items() if re.search(pattern, line)]
            problems += [f"{file}:{number}: {why}: {line.strip()[:100]}" for why in whys]
    assert not problems, "\n".join(problems)


def test_no_page_says_a_line_twice():
    """A paragraph that a merge has doubled has lines that stand in its page twice."""
    for page in PAGES:
        # no tables
        lines = re.findall(r"^(?! *\|).{40,}$", re.sub(r"```.*?```", "", text(page), flags=re.S), re.M)
        assert len(lines) == len(set(lines)), f"{page}: {Counter(lines).most_common(1)}"


def test_the_pages_say_what_the_notebooks_say_of_themselves():
    stale = [path.name for path, page in documents.pages().items() if path.read_text() != page]
    assert not stale, f"run python tests/documents.py: {stale}"


def test_no_notebook_comes_before_what_it_builds_on():
    needs = {
        path.stem: nbformat.read(path, as_version=4).metadata.mpdemo.prerequisites
        for path in documents.notebooks()
    }
    for plan in ("One day", "Two days", "Four days", "A term of 45-minute lessons"):
        names = re.findall(
            r"\((\w+)\.ipynb\)",
            text("notebooks/for_trainers.md").partition(f"### {plan}\n")[2].partition("##")[0],
        )
        assert len(names) > 7
        for position, name in enumerate(names):
            assert set(needs[name]) <= {earlier[:2] for earlier in names[:position]}, f"{plan}: {name}"


def test_trainers_are_sent_to_sections_that_exist():
    """They are named as `03, *A section*`, or by a line that begins with the notebook's number."""
    page, numbers = (
        text("notebooks/for_trainers.md")
        .partition("## What learners believe")[2]
        .partition("## During")[0],
        set(),
    )
    for line in re.split(r"^- ", page, flags=re.M)[1:]:
        for number, title in re.findall(r"(\d\d)(?:[^*\d]|\d(?!\d[,:]))*?\*([^*]+)\*", line):
            (file,) = (file for file in NOTEBOOKS if file.name.startswith(number))
            assert re.search(rf"## \d+\. {re.escape(' '.join(title.split()))}\\n", text(file)), (
                f"{number}: {title}"
            )
            numbers.add(number)
    assert len(numbers) > 14


@pytest.mark.parametrize("file", PAGES, ids=str)
def test_a_page_names_what_is_there(file):
    page, missing = text(file), []
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        path, _, heading = target.partition("#")
        place = (root() / file).parent / path if path else root() / file
        there = re.match(r"https?:|mailto:", target) or place.exists()
        if there and heading and place.suffix == ".md":
            there = heading in anchors(place.read_text())
        missing += [] if there else [f"link to {target}"]
    for name in re.findall(r"`((?:mpdemo|notebooks|slurm|tests)/[\w./-]*\w/?)`", page):
        missing += [] if (root() / name).exists() or "NAME" in name else [name]
    missing += [word for word in re.findall(r"(?:`|\$ )mpdemo ([a-z]+)", page) if word not in COMMANDS]
    targets = re.findall(r"^([\w.-]+):", text("Makefile"), re.M)
    wanted = re.findall(r"^\s*(?:\$ )?make (\w+)|`make (\w+)`", page, re.M)
    missing += [f"make {max(words)}" for words in wanted if max(words) not in targets]
    assert not missing, f"{file} names what is not there: {', '.join(missing)}"


def test_every_way_into_jupyterlab_trusts_the_notebooks_first():
    """Without it, a page that is reloaded in the middle of a job shows text in place of the live view."""
    starts = [
        (file, start) for file in ("Makefile", *PAGES) for start in re.finditer(JUPYTERLAB, text(file))
    ]
    assert {str(file) for file, _ in starts} >= {"Makefile", "README.md", "notebooks/for_trainers.md"}
    missing = [
        str(file) for file, start in starts if TRUST not in text(file)[start.start() - 300 : start.start()]
    ]
    assert not missing, f"no {TRUST} before the start in {missing}"


def anchors(page) -> set:
    """Return the anchors of a page: those that GitHub makes of its headings, and its own."""
    lines = re.findall(r"^#+ (.*)$", page, re.M)
    made = {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}
    return made | set(re.findall(r'<a id="([^"]+)"', page))


def test_the_site_has_a_place_for_every_page():
    """A page without one is a warning of Sphinx, and so an error of `make site`, which runs by night."""
    places = [
        glob
        for globs in runpy.run_path(root() / "tests/site/conf.py")["CHAPTERS"].values()
        for glob in globs
    ]
    pages = [page for page in PAGES if str(page) != "README.md" and page.parts[:2] != ("tests", "site")]
    lost = [page for page in pages if not any(page.match(f"{place}.md") for place in places)]
    assert pages and not lost


def test_programs_name_things_that_exist():
    named = r"\b(?:notebooks/\w+\.ipynb|(?:mpdemo|tests)/[\w/]+\.(?:py|cfg|toml))\b"
    programs = [file for file in FILES if file.suffix == ".py"]
    names = [(file, name) for file in programs for name in re.findall(named, text(file))]
    missing = [f"{file}: {name}" for file, name in names if not (root() / name).exists()]
    assert not missing, "named and not there: " + ", ".join(missing)


def test_every_requirement_has_no_upper_bound_but_the_one_that_is_explained():
    project = tomllib.loads(text("pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *(r for group in project["optional-dependencies"].values() for r in group),
    ]
    assert [r for r in wanted if re.search(r"==|<", r)] == ["nbval==0.11.0"]


def test_the_course_page_names_each_rung_its_notebook_and_its_file():
    for rung in RUNGS:
        rows = [
            line for line in text("notebooks/README.md").splitlines() if f"mpdemo/rungs/{rung}.py)" in line
        ]
        assert len(rows) == 1, f"notebooks/README.md: one row for {rung}, with its file"
        assert ".ipynb)" in rows[0], f"notebooks/README.md: the row of {rung} links no notebook"


def test_the_page_of_sites_lists_each():
    sites = [file.relative_to("slurm") for file in FILES if file.is_relative_to("slurm/sites")]
    assert all(f"({site})" in text("slurm/README.md") for site in sites)


@pytest.mark.parametrize("file", [page for page in PAGES if page.name == "README.md"], ids=str)
def test_a_command_on_a_page_parses(file, call_mpdemo):
    for line in re.findall(r"^\$ mpdemo (.*?)(?: +#.*)?$", text(file), re.M):
        command, *arguments = shlex.split(line.partition(" -- ")[0])
        shown = set(
            re.findall(
                r"--[\w-]+", call_mpdemo(command, *arguments[: command == "cluster"], "--help").stdout
            )
        )
        used = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        assert shown.issuperset(used), f"{file}: {line}"


def test_a_word_of_the_glossary_is_explained_where_it_first_stands():
    """There it is in *italics*, or a link to the glossary."""
    books = [(path.name, nbformat.read(path, as_version=4)) for path in documents.notebooks()]
    cells = [(name, cell) for name, notebook in books for cell in notebook.cells]
    prose = [(name, cell.source) for name, cell in cells if cell.cell_type == "markdown"]
    rows = GLOSSARY.findall(text("notebooks/glossary.md"))
    words = [word.lower() for _, word in rows]
    assert len(words) > 60 and words == sorted(set(words))
    problems = [problem for anchor, word in rows if (problem := unexplained(anchor, word, prose))]
    strangers = {anchor for _, source in prose for anchor in re.findall(r"glossary\.md#([\w-]+)", source)}
    problems += [
        f"no row for glossary.md#{anchor}" for anchor in strangers - {anchor for anchor, _ in rows}
    ]
    assert not problems, "\n".join(problems)


def unexplained(anchor, word, prose) -> str:
    """Return what is wrong with the first use of a word; nothing if it is explained there."""
    pattern = re.escape(word).replace(r"\ ", r"\s+")
    use = re.compile(rf"(?<![\w-]){pattern}(e?s)?(?![\w-])", 0 if word == "World" else re.I)
    for file, source in prose:
        if match := use.search(NOT_PROSE.sub(lambda code: " " * len(code.group()), source)):
            before, after = source[: match.start()], source[match.end() :]
            italic = re.search(r"\*[^*\n]*$", before) and re.match(r"[^*\n]*\*", after)
            if italic or f"glossary.md#{anchor})" in source:
                return ""
            return f"{file}: ... {before[-40:]}{match[0]}{after[:40]} ...: put it in italics, or link to glossary.md"
    return f"no notebook uses {word!r}"
