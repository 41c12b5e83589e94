"""show(): the right lines of a file, with a clear error where there are none."""

import pytest

from mpdemo.errors import UserError
from mpdemo.notebook.show import find, show
from mpdemo.paths import root


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
    assert find("notebook/diff.py", "SAME_LINE").text.startswith("SAME_LINE = ")


def test_a_title_with_underscores_is_not_bold():
    shown = show("parallel/ddp.py", "DDP.__init__").data["text/markdown"]
    assert shown.startswith(r"[mpdemo/parallel/ddp.py: DDP.\_\_init\_\_](../mpdemo/parallel/ddp.py)")


def test_decorators_belong_to_what_they_decorate():
    assert find("notebook/show.py", "Source").text.startswith("@dataclass\nclass Source:")


def test_docstrings_can_be_left_out_and_line_numbers_stay_those_of_the_file():
    source = find("errors.py", "UserError", docstrings=False)
    assert '"""' not in source.text
    file = (root() / "mpdemo/errors.py").read_text().splitlines()
    assert all(file[number - 1] == line for number, line in source.lines)


def test_a_job_script_is_fenced_as_shell():
    assert "```bash\n#!/bin/bash\n" in show("#!/bin/bash\necho hello\n").data["text/markdown"]


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: show("parallel/dpp.py"), ["no such file: parallel/dpp.py", "did you mean 'parallel/ddp.py'"]),
        (lambda: show("errors.py", "UserErr"), ["no 'UserErr' in mpdemo/errors.py", "UserError._render_traceback_"]),
        (lambda: show(find), ["cannot show a function; give a path, a path and a name, or a text"]),
    ],
)
def test_the_error_names_what_is_missing_and_what_exists(call, parts):
    with pytest.raises(UserError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_lines_are_found_by_their_texts():
    text = show("errors.py", "UserError", lines=("class UserError", "_render_traceback_")).data["text/markdown"]
    assert "\nclass UserError" in text and text.endswith("_render_traceback_(self):\n```")
    assert show("errors.py", lines=("class UserError",)).data["text/markdown"].count("\n") == 4
    for lines in (("no such line",), ("class UserError", "no such line")):
        with pytest.raises(UserError, match="no line with 'no such line' in mpdemo/errors.py"):
            show("errors.py", lines=lines)
