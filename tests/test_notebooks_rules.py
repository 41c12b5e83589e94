"""The lint finds every trap, each in a notebook that is otherwise in order; the refresh leaves no trace."""

import copy
from pathlib import Path

import nbformat
import pytest
from notebook_rules import lint

import notebooks

v4 = nbformat.v4
PNG = {"text/plain": "a picture", "image/png": "iVBORw0KGgo="}


def code(source, outputs=(), *, tags=(), count=None, **metadata):
    cell = v4.new_code_cell(source, outputs=list(outputs), execution_count=count, metadata=metadata)
    if tags:
        cell.metadata["tags"] = list(tags)
    return cell


def stream(text, name="stdout"):
    return v4.new_output("stream", name=name, text=text)


SHOWN = v4.new_output("display_data", data={"text/markdown": f"```python\n{105 * 'x'}\n```"})
ERROR = v4.new_output("error", ename="KeyError", evalue="3", traceback=["KeyError: 3"])


def notebook(*cells):
    """A notebook in order, with some cells more at the end; cells without a count are counted on."""
    picture = v4.new_output("execute_result", data=PNG, execution_count=1)
    first = [v4.new_markdown_cell("# A title\n\nThe goal."), code("picture", [picture]), code("assert True")]
    whole = v4.new_notebook(cells=[*first, *cells])
    ran = [cell for cell in whole.cells if cell.cell_type == "code"]
    for number, cell in enumerate(ran, 1):
        cell.execution_count = number if cell.execution_count is None else cell.execution_count or None
    return whole


def without(number):
    """The notebook in order, without one of its cells."""
    whole = notebook()
    del whole.cells[number]
    for count, cell in enumerate([cell for cell in whole.cells if cell.cell_type == "code"], 1):
        cell.execution_count = count
    return whole


def with_metadata(**metadata):
    whole = notebook()
    whole.metadata.update(metadata)
    return whole


def with_twins():
    whole = notebook()
    whole.cells[2]["id"] = whole.cells[1]["id"]
    return whole


GOOD = {
    "nothing more": notebook(),
    "raises": notebook(code("raise KeyError(3)", [ERROR], tags=["raises-exception"])),
    "skipped": notebook(code("for_eternity()", tags=["nbval-skip"], count=0)),
    "link": notebook(v4.new_markdown_cell("[the loop](../mpdemo/errors.py) and [a page](https://pytorch.org)")),
    "solution": notebook(code("# Solution - click to open\nx = 1", tags=["solution"], jupyter={"source_hidden": True})),
    "remainder": notebook(code("x = 7 % 3 != 2")),
}
BAD = {
    "title": (without(0), "does not begin with a title"),
    "picture": (without(1), "has no picture in its first five cells"),
    "assert": (without(2), "asserts nothing"),
    "widget state": (with_metadata(widgets={}), "saves widget state"),
    "ids": (with_twins(), "two cells with the same id"),
    "never executed": (notebook(code("x = 1", count=0)), "was not executed from top to bottom: [1, 2, None]"),
    "executed twice": (notebook(code("x = 1", count=7)), "was not executed from top to bottom: [1, 2, 7]"),
    "median": (notebook(*[code("x = 1\n" * 9) for _ in range(5)]), "a median of 9"),
    "long cell": (notebook(code("x = 1\n" * 20)), "has 20 lines; at most 19"),
    "wide cell": (notebook(code("%%ranks\nx = " + 101 * "1")), "has a line of 105 characters; at most 104"),
    "wide source": (notebook(code("show(f)", [SHOWN])), "has a line of 105 characters; at most 104"),
    "empty cell": (notebook(code(" ")), "is empty"),
    "semicolon": (notebook(code("f();")), "ends with ';'"),
    "shell": (notebook(code("!false")), "uses ! or %"),
    "shell in the middle": (notebook(code("if x:\n    !false")), "uses ! or %"),
    "shell's answer": (notebook(code("x = !ls")), "uses ! or %"),
    "magic": (notebook(code("%nosuchmagic")), "uses ! or %"),
    "cell magic": (notebook(code("%%time\nx = 1")), "uses ! or %"),
    "display again": (notebook(code("clear_output()")), "nbval cannot compare it"),
    "orphans": (notebook(code("import subprocess")), "a child of the kernel outlives it"),
    "spawn": (notebook(code("mp.spawn(f, nprocs=2)")), "a child of the kernel outlives it"),
    "pyplot": (notebook(code("import matplotlib.pyplot as plt")), "figures come from mpdemo.notebook.plots"),
    "comment": (notebook(code("# NBVAL_SKIP\nx = 1")), "say it with a tag"),
    "path": (notebook(code("x = '/home/me/data'")), "names a path of one machine: '/home/m'"),
    "path in text": (notebook(v4.new_markdown_cell("see /tmp/me")), "names a path of one machine: '/tmp/'"),
    "mistyped tag": (notebook(code("x = 1", tags=["nbval-ignore-outputs"])), "unknown tag 'nbval-ignore-outputs'"),
    "any exception": (
        notebook(code("raise KeyError(3)", [ERROR], tags=["raises-exception", "nbval-ignore-output"])),
        "which exception it raises is then not compared",
    ),
    "open solution": (notebook(code("# Solution - click to open", tags=["solution"])), "not collapsed"),
    "solution's head": (
        notebook(code("x = 1", tags=["solution"], jupyter={"source_hidden": True})),
        "does not begin with '# Solution - click to open'",
    ),
    "error": (notebook(code("raise KeyError(3)", [ERROR])), "ended with an error"),
    "raises nothing": (
        notebook(code("x = 1", tags=["raises-exception"])),
        "tagged raises-exception and raised nothing",
    ),
    "widget": (
        notebook(code("w", [v4.new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}})])),
        "saved a widget",
    ),
    "stderr": (notebook(code("f()", [stream("Warning: old", "stderr")])), "printed to stderr: 'Warning: old'"),
    "path in output": (notebook(code("f()", [stream("at /root/x")])), "saved text of one machine: '/root/'"),
    "address": (notebook(code("f", [stream("<f at 0x7f32a1b0>")])), "saved text of one machine: '0x7f32a1b0'"),
    "script": (
        notebook(code("f", [v4.new_output("display_data", data={"text/html": "<script src='https://cdn'>"})])),
        "runs a script or loads from elsewhere",
    ),
    "large": (notebook(code("f", [stream("x" * 300_001)])), "more than 300 kB"),
    "dead link": (
        notebook(v4.new_markdown_cell("[gone](99_gone.ipynb)")),
        "links to 99_gone.ipynb, which is not there",
    ),
    "picture from elsewhere": (
        notebook(v4.new_markdown_cell("![logo](https://example.org/a.png)")),
        "loads a picture from elsewhere",
    ),
}


@pytest.fixture
def folder():
    return notebooks.root() / "notebooks"


@pytest.mark.parametrize("name", GOOD)
def test_a_notebook_in_order_is_left_alone(name, folder):
    assert lint(GOOD[name], folder) == []


@pytest.mark.parametrize("name", BAD)
def test_a_trap_is_found(name, folder):
    whole, said = BAD[name]
    problems = lint(whole, folder)
    assert len(problems) == 1 and said in problems[0], problems


def test_normal_form_is_stable_and_keeps_what_is_compared():
    messy = notebook(code("print(1)  ", [stream("a"), stream("b\n")], tags=["solution", "check"], collapsed=True))
    before = notebooks.compared(messy)
    once = notebooks.text_of(notebooks.normalise(copy.deepcopy(messy)))
    again = notebooks.text_of(notebooks.normalise(nbformat.reads(once, as_version=4)))
    assert once == again and "collapsed" not in once
    assert notebooks.compared(nbformat.reads(once, as_version=4)) == before
    assert nbformat.reads(once, as_version=4).cells[3].outputs == [stream("ab\n")]


def test_only_what_the_sanitizer_names_may_change():
    def printing(text):
        return notebooks.compared(notebook(code("f()", [stream(text)])))

    assert printing("3.1 s, 20 images/s") == printing("4.25 s, 1,200.5 images/s")
    assert printing("1.87 times the speed") == printing("1.9 times the speed")
    assert printing("loss 3.1") != printing("loss 3.2")
    assert printing("97 % of the bound") == printing("93.5 % of the bound")
    on_this_machine = "no Slurm in reach: ddp runs on this machine, 2 processes under torchrun (job 16)\n"
    assert printing(on_this_machine) == printing("submitted ddp to cluster box: job 7 (slurm/03_ddp.sbatch)\n")
    assert printing("found job 16 (done)") == printing("found job 7 (done)") != printing("found job 7 (failed)")
    assert printing("accuracy 97 %") != printing("accuracy 93 %")


def test_a_refresh_executes_saves_and_then_leaves_no_trace(tmp_path, monkeypatch):
    whole = notebook(code("import time\nprint(f'{time.time():.3f} s')"), code("print(1 + 1)"))
    whole.cells[1].source = "from mpdemo.notebook.bundle import Bundle\nBundle('a picture', png='iVBORw0KGgo=')"
    path = tmp_path / "course" / "99_try.ipynb"
    path.parent.mkdir()
    nbformat.write(whole, path)

    def copied(folder):
        (Path(folder) / "notebooks").mkdir()
        (Path(folder) / "mpdemo").symlink_to(notebooks.root() / "mpdemo")
        return Path(folder)

    monkeypatch.setattr(notebooks, "fresh_copy", copied)
    assert notebooks.refresh(path, tmp_path / "ladder") == "changed"
    saved = nbformat.read(path, as_version=4)
    assert saved.cells[4].outputs[0].text == "2\n"
    assert notebooks.check(path) == []
    assert notebooks.refresh(path, tmp_path / "ladder") == "same"
    assert notebooks.refresh(path, tmp_path / "ladder", everything=True) == "changed"  # another time of day
