"""show(): the right lines of a file, with a clear error where there are none."""

import ast

import pytest

from mpdemo.errors import UserError, wrapped
from mpdemo.notebook.show import SMALLER, find, show
from mpdemo.paths import root


def test_a_file_is_shown_whole_with_a_link_or_one_thing_or_lines_of_it():
    data, _ = show("errors.py")._repr_mimebundle_()
    assert data["text/plain"] == "mpdemo/errors.py"
    assert data["text/markdown"].startswith(
        f"[mpdemo/errors.py](../mpdemo/errors.py)\n\n{SMALLER}\n\n```python\n"
    )
    assert (root() / "mpdemo/errors.py").read_text().strip() in data["text/markdown"]
    text = show("errors.py", "one_line").data["text/markdown"]
    assert "\ndef one_line(text) -> str:\n" in text and "class UserError" not in text
    assert find("settings/schedules.py", "Schedule")[1].startswith(
        "@dataclass(frozen=True)\nclass Schedule:"
    )
    assert find("notebook/show.py", "LANGUAGES")[1].startswith("LANGUAGES = ")
    text = show("errors.py", "UserError", lines=("class UserError", "_render_traceback_")).data[
        "text/markdown"
    ]
    assert "\nclass UserError" in text and text.endswith("_render_traceback_(self):\n```\n\n</div>")
    assert show("errors.py", lines=("class UserError",)).data["text/markdown"].count("\n") == 8


def test_docstrings_can_be_left_out():
    """What is left is the same program."""
    whole, bare = (find("models/blocks.py", docstrings=docstrings)[1] for docstrings in (True, False))
    assert '"""' in whole and '"""' not in bare

    def code(text):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                del node.body[0]
        return ast.dump(tree)

    assert code(bare) == code(whole)


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
