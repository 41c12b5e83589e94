"""show() and diff(): the right lines of a file, with a clear error where there are none; changes as git shows them."""

import ast

import pytest

from mpdemo.errors import UserError
from mpdemo.notebook.show import diff, find, show
from mpdemo.paths import root

BEFORE = "def step(model, batch):\n    loss = model(batch)\n    loss.backward()\n    return loss\n"
AFTER = BEFORE.replace("    loss = model(batch)", "    shard = batch[rank]\n    loss = model(shard)")


def test_a_file_is_shown_whole_with_a_link():
    data, _ = show("errors.py")._repr_mimebundle_()
    assert data["text/plain"] == "mpdemo/errors.py"
    assert data["text/markdown"].startswith("[mpdemo/errors.py](../mpdemo/errors.py)\n\n```python\n")
    assert (root() / "mpdemo/errors.py").read_text().strip() in data["text/markdown"]


def test_one_thing_in_a_file_is_found_by_its_qualified_name():
    text = show("errors.py", "UserError._render_traceback_").data["text/markdown"]
    assert '\ndef _render_traceback_(self):\n    """IPython' in text
    assert "class UserError" not in text
    assert find("notebook/show.py", "Source").text.startswith("class Source(NamedTuple):")
    assert find("notebook/show.py", "LANGUAGES").text.startswith("LANGUAGES = ")
    heading = r"[mpdemo/models/blocks.py: Blocks.\_\_init\_\_](../mpdemo/models/blocks.py)"  # not in bold letters
    assert show("models/blocks.py", "Blocks.__init__").data["text/markdown"].startswith(heading)


def test_docstrings_can_be_left_out():
    """What is left is the same program."""
    whole, bare = (find("models/blocks.py", docstrings=docstrings).text for docstrings in (True, False))
    assert '"""' in whole and '"""' not in bare

    def code(text):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                del node.body[0]
        return ast.dump(tree)

    assert code(bare) == code(whole)


def test_lines_are_found_by_their_texts():
    text = show("errors.py", "UserError", lines=("class UserError", "_render_traceback_")).data["text/markdown"]
    assert "\nclass UserError" in text and text.endswith("_render_traceback_(self):\n```")
    assert show("errors.py", lines=("class UserError",)).data["text/markdown"].count("\n") == 4
    assert "```bash\n#!/bin/bash\n" in show("#!/bin/bash\necho hello\n").data["text/markdown"]


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: show("models/block.py"), ["no such file: models/block.py", "did you mean 'models/blocks.py'"]),
        (lambda: show("errors.py", "UserErr"), ["no 'UserErr' in mpdemo/errors.py", "UserError._render_traceback_"]),
        (lambda: show(find), ["cannot show a function; give a path, a path and a name, or a text"]),
        (lambda: show("errors.py", lines=("no such line",)), ["no line with 'no such line' in mpdemo/errors.py"]),
        (lambda: show("errors.py", lines=("import", "no such")), ["no line with 'no such' in mpdemo/errors.py"]),
    ],
)
def test_the_error_names_what_is_missing_and_what_exists(call, parts):
    with pytest.raises(UserError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_difference_is_fenced_as_git_shows_it():
    shown = diff(BEFORE, AFTER, context=1)
    changed = ["-    loss = model(batch)", "+    shard = batch[rank]", "+    loss = model(shard)"]
    around = [" def step(model, batch):", *changed, "     loss.backward()"]
    assert repr(shown).splitlines() == ["--- text", "+++ text", "@@", *around]
    assert shown.data["text/markdown"] == f"```diff\n{shown!r}\n```"
    assert repr(diff(BEFORE, BEFORE)) == "text and text are the same"


def test_a_difference_of_files_leaves_docstrings_out_and_keeps_every_other_line():
    pair = (("models/blocks.py", "Blocks.stage"), ("models/blocks.py", "Blocks.cut"))
    lines = repr(diff(*pair, context=100)).splitlines()
    assert lines[:2] == ["--- mpdemo/models/blocks.py: Blocks.stage", "+++ mpdemo/models/blocks.py: Blocks.cut"]
    for mark, target in zip("-+", pair, strict=True):
        side = [line[1:] for line in lines[3:] if line[0] in (mark, " ")]
        assert side == find(*target, docstrings=False).text.splitlines()
    assert '"""' not in repr(diff(*pair))
