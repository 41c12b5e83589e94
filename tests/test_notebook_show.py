"""show(): the right lines of a file, with a clear error where there are none."""

import pytest

from mpdemo.errors import UserError, wrapped
from mpdemo.notebook.show import find, show


def test_a_constant_is_shown():
    """The notebooks compare what else is: files, functions, classes and lines, with and without docstrings."""
    title, text = find("notebook/show.py", "LANGUAGES")[:2]
    assert text.startswith("LANGUAGES = ") and title.startswith("mpdemo/notebook/show.py")


@pytest.mark.parametrize(
    ("words", "lines", "parts"),
    [
        (["models/block.py"], None, ["no such file: 'models/block.py'"]),
        (["errors.py", "UserErr"], None, ["no 'UserErr' in mpdemo/errors.py", "UserError"]),
        (["errors.py"], ["no such line"], ["no line with 'no such line' in mpdemo/errors.py"]),
        (["errors.py"], ["import", "no such"], ["no line with 'no such' in mpdemo/errors.py"]),
    ],
)
def test_the_error_names_what_is_missing_and_what_exists(words, lines, parts):
    with pytest.raises(UserError) as caught:
        show(*words, lines=lines)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_message_breaks_between_words_and_keeps_its_lines_and_paths():
    path = "/scratch/" + "deep/" * 25
    text = f"one {'word ' * 30}end\n\n  indented {path} end"
    lines = wrapped(text).split("\n")
    assert [len(line) <= 95 or line == path for line in lines] == [True] * len(lines) and "" in lines
    assert " ".join(lines).split() == text.split() and "  indented" in lines
    assert UserError(text)._render_traceback_() == [wrapped(f"UserError: {text}")]
    assert wrapped("a " * 60, "> ").split("\n")[1].startswith("> a")
