"""No word is used before it is explained: where a word of the glossary first stands, it is in *italics* or a link."""

import re

import nbformat
import pytest

from mpdemo.paths import root

FOLDER = root() / "notebooks"
ROW = re.compile(
    r'^\| <a id="(?P<anchor>[^"]+)"></a>(?P<word>[^|]+?) \| (?P<meaning>[^|]+) \| \[(?P<number>\d\d)\]', re.M
)
GLOSSARY = [match.groupdict() for match in ROW.finditer((FOLDER / "glossary.md").read_text())]
NOT_PROSE = re.compile(
    r"```.*?```|`[^`]*`|<[^>]+>|\]\([^)]*\)|^#[^\n]*$|https?://\S+", re.S | re.M
)  # code, links' targets, headings


def course() -> list[tuple[str, str]]:
    """Return (number of the notebook, text) of every Markdown cell, in reading order."""
    return [
        (path.name[:2], cell.source)
        for path in sorted(FOLDER.glob("*.ipynb"))
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "markdown"
    ]


def first_use(row):
    """Return the notebook, the place in the text and whether it explains or links, of a word's first use."""
    word = re.escape(row["word"]).replace(r"\ ", r"\s+")
    use = re.compile(rf"(?<![\w-]){word}(e?s)?(?![\w-])", 0 if row["word"] == "World" else re.I)
    for number, source in course():
        links = f"glossary.md#{row['anchor']})" in source
        if match := use.search(NOT_PROSE.sub(lambda code: " " * len(code.group()), source)):
            around = source[max(0, match.start() - 40) : match.end() + 40]
            before, after = source[: match.start()], source[match.end() :]
            italic = re.search(r"\*[^*\n]*$", before) and re.match(r"[^*\n]*\*", after)
            return number, around.replace("\n", " "), bool(italic) or links
    return None


def test_the_glossary_is_a_list_in_order():
    words = [row["word"].lower() for row in GLOSSARY]
    assert len(words) > 60 and words == sorted(words) and len(set(words)) == len(words)


@pytest.mark.parametrize("row", GLOSSARY, ids=lambda row: row["anchor"])
def test_a_word_is_explained_where_it_first_stands(row):
    assert (use := first_use(row)), f"no notebook uses {row['word']!r}"
    number, around, explained = use
    assert explained, f"notebook {number}: ... {around} ...: put it in italics and explain it, or link to glossary.md"


def test_links_into_the_glossary_exist():
    anchors = {row["anchor"] for row in GLOSSARY}
    for number, source in course():
        for anchor in re.findall(r"glossary\.md#([\w-]+)", source):
            assert anchor in anchors, f"notebook {number} links to glossary.md#{anchor}"
