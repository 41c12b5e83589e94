"""show() and diff(): the right lines, without PyTorch, with a clear word about what is not there."""

import html.parser
import subprocess
import sys

import pytest

from mpdemo.errors import UserError
from mpdemo.notebook.show import diff, show
from mpdemo.notebook.source import find
from mpdemo.paths import root

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


def test_a_file_is_shown_whole_with_a_link():
    shown = show("errors.py")
    data, _ = shown._repr_mimebundle_()
    assert data["text/plain"] == "mpdemo/errors.py"
    assert data["text/markdown"].startswith("[mpdemo/errors.py](../mpdemo/errors.py)\n\n```python\n")
    assert (root() / "mpdemo/errors.py").read_text().strip() in data["text/markdown"]


def test_one_thing_in_a_file_is_found_by_its_qualified_name():
    text = show("errors.py", "UserError._render_traceback_").data["text/markdown"]
    assert '\ndef _render_traceback_(self):\n    """IPython' in text
    assert "class UserError" not in text
    assert find("notebook/show.py", "SAME_LINE").text.startswith("SAME_LINE = ")


def test_an_object_shows_the_same_as_its_path_and_name():
    assert show(diff).data == show("show.py", "diff").data
    assert show(find).data == show("source.py", "find").data
    assert show(sys.modules["mpdemo.errors"]).data == show("errors.py").data


def test_decorators_belong_to_what_they_decorate():
    assert find("source.py", "Source").text.startswith("@dataclass\nclass Source:")


def test_a_function_of_the_test_itself():
    def local(x):
        return x + 1

    assert find(local).text == "def local(x):\n    return x + 1"


def test_docstrings_can_be_left_out_and_line_numbers_stay_those_of_the_file():
    source = find("errors.py", "UserError", docstrings=False)
    assert '"""' not in source.text
    file = (root() / "mpdemo/errors.py").read_text().splitlines()
    assert all(file[number - 1] == line for number, line in source.lines)


def test_a_job_script_is_fenced_as_shell():
    assert "```bash\n#!/bin/bash\n" in show("#!/bin/bash\necho hello\n").data["text/markdown"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: show("parallel/dpp.py"), ["no such file: parallel/dpp.py", "do you mean"]),
        (lambda: show("errors.py", "UserErr"), ["no 'UserErr' in mpdemo/errors.py", "UserError._render_traceback_"]),
        (lambda: show(3), ["nothing to show for a int"]),
    ],
)
def test_what_is_not_there_is_said(call, words):
    with pytest.raises(UserError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_diff_pairs_changed_lines_and_marks_new_ones():
    shown = diff(BEFORE, AFTER)
    rows = Table(shown.data["text/html"]).rows
    assert ["", "", "2 +", "    shard = batch[rank]"] in rows
    assert ["2 -", "    loss = model(batch)", "3 +", "    loss = model(shard)"] in rows
    assert ["1", "def step(model, batch):", "1", "def step(model, batch):"] in rows
    assert "+    shard = batch[rank]" in shown.data["text/plain"]


def test_diff_loses_no_line_whatever_changed():
    before, after = find("notebook/show.py").lines, find("source.py").lines
    rows = Table(diff("show.py", "source.py", docstrings=True, context=None).data["text/html"]).rows[1:]
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


def test_diff_of_equal_sources_says_so():
    assert repr(diff(BEFORE, BEFORE)).endswith("are the same")


def test_code_is_escaped():
    shown = diff("a < b\n<script>\n", "a < b\n<b>&\n")
    assert "<script>" not in shown.data["text/html"]
    assert ["2 -", "<script>", "", ""] in Table(shown.data["text/html"]).rows


def test_front_end_modules_load_without_torch():
    code = "import mpdemo.notebook.show, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=root(), check=True, timeout=60)
