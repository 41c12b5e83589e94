"""diff(): no line is lost, changed lines stand side by side, and changed_lines() counts the marked rows."""

import html.parser

import pytest

from mpdemo.notebook.diff import changed_lines, diff
from mpdemo.notebook.show import find

BEFORE = """def step(model, batch):
    loss = model(batch)
    loss.backward()
    return loss
"""
AFTER = """def step(model, batch):
    shard = batch[rank]
    loss = model(shard)
    loss.backward()
    return loss
"""


class Table(html.parser.HTMLParser):
    """Collect the cells' texts, and fail on tags that do not close."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open = [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        if tag != "col":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def test_diff_pairs_changed_lines_and_marks_new_ones():
    shown = diff(BEFORE, AFTER)
    rows = Table(shown.data["text/html"]).rows
    assert ["", "", "2 +", "    shard = batch[rank]"] in rows
    assert ["2 -", "    loss = model(batch)", "3 +", "    loss = model(shard)"] in rows
    assert ["1", "def step(model, batch):", "1", "def step(model, batch):"] in rows
    assert "+    shard = batch[rank]" in shown.data["text/plain"]


def test_diff_loses_no_line_whatever_changed():
    before, after = find("notebook/show.py").lines, find("notebook/diff.py").lines
    rows = Table(diff("notebook/show.py", "notebook/diff.py", docstrings=True, context=None).data["text/html"]).rows[1:]
    left = [row[1] for row in rows if row[0]]
    right = [row[3] for row in rows if row[2]]
    assert left == [text for _, text in before]
    assert right == [text for _, text in after]


def test_diff_folds_equal_stretches():
    before = "\n".join(f"line {i}" for i in range(30)) + "\n"
    rows = Table(diff(before, before.replace("line 15", "changed"), context=2).data["text/html"]).rows
    assert rows[1] == ["13 equal lines"]
    assert rows[-1] == ["12 equal lines"]
    assert len(rows) == 1 + 1 + 2 + 2 + 2 + 1  # head, fold, before, the two unlike lines, after, fold


def test_diff_of_equal_sources_reports_that_they_are_the_same():
    assert repr(diff(BEFORE, BEFORE)).endswith("are the same")


def test_code_is_escaped():
    shown = diff("a < b\n<script>\n", "a < b\n<b>&\n")
    assert "<script>" not in shown.data["text/html"]
    assert ["2 -", "<script>", "", ""] in Table(shown.data["text/html"]).rows


@pytest.mark.parametrize(
    ("before", "after", "marked"),
    [
        (BEFORE, AFTER, 2),  # one changed pair, one new line
        (BEFORE, BEFORE, 0),
        ("parallel/single.py", "parallel/ddp.py", None),
        ("parallel/model_parallel.py", "parallel/pipeline.py", None),
    ],
)
def test_changed_lines_counts_the_marked_rows(before, after, marked):
    rows = Table(diff(before, after).data["text/html"]).rows[1:]
    in_table = sum(len(row) == 4 and (row[0].endswith("-") or row[2].endswith("+")) for row in rows)
    assert changed_lines(before, after) == in_table
    assert in_table > 0 if marked is None else in_table == marked
