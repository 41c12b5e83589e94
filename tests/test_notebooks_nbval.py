"""Every repair of notebooks/conftest.py, tried on the real nbval: with it, and without it.

The runs without it say when a repair is no longer needed: then a test here fails, and the repair can go.
"""

import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import nbformat
import pytest
from project import environment

from mpdemo.paths import root

v4 = nbformat.v4


def stream(text, name="stdout"):
    return v4.new_output("stream", name=name, text=text)


CHILD = """import subprocess, sys
done = subprocess.run([sys.executable, "-c", "print('from a child')"])"""
PICTURE = "from mpdemo.notebook.bundle import Bundle\nBundle('a line', png='NEW=')"

# name: (source, saved outputs, tags, passes with the repairs, passes without)
CELLS = {
    "child_process": (CHILD, [stream("from a child\n")], [], True, False),
    "semicolon": ("1 + 1;", [], [], True, False),
    "unknown_magic": (
        "%nosuchmagic\nraise ValueError",
        [stream("UsageError: Line magic function `%nosuchmagic` not found.\n", "stderr")],
        [],
        False,
        True,
    ),
    "raises_nothing": ("x = 1", [], ["raises-exception"], False, True),
    "raises": (
        "raise KeyError(3)",
        [v4.new_output("error", ename="KeyError", evalue="3", traceback=[])],
        ["raises-exception"],
        True,
        True,
    ),
    "says_it_is_a_test": ("import os; print(os.environ.get('NBVAL'))", [stream("1\n")], [], True, False),
    "wrong_number": ("print(3)", [stream("4\n")], [], False, False),
    "wrong_time": ("print('3.1 s')", [stream("4.25 s\n")], [], True, True),
    "wrong_digits": ("print('loss 3.1')", [stream("loss 3.2\n")], [], False, False),
    "picture": (
        PICTURE,
        [v4.new_output("execute_result", execution_count=1, data={"text/plain": "a line", "image/png": "OLD="})],
        [],
        True,
        True,
    ),
    "picture_with_another_line": (
        PICTURE,
        [v4.new_output("execute_result", execution_count=1, data={"text/plain": "b line", "image/png": "OLD="})],
        [],
        False,
        False,
    ),
}


def run_nbval(folder, *files, repaired=True, limit=60):
    """Run nbval on the notebooks of `folder`; return whether each passed, and all it printed."""
    if repaired:
        shutil.copy(root() / "notebooks" / "conftest.py", folder)
    options = ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={limit}", f"--junitxml={folder}/result.xml"]
    sanitizer = root() / "tests" / "nbval.cfg"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    done = subprocess.run(
        [*command, "--nbval-sanitize-with", str(sanitizer), *map(str, files)],
        cwd=folder,
        env=environment(root()) | {"IPYTHONDIR": str(folder / "ipython")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    tree = ElementTree.parse(folder / "result.xml")
    passed = {}
    for case in tree.iter("testcase"):
        name = (
            case.get("classname").split(".")[-2] if case.get("classname").endswith("ipynb") else case.get("classname")
        )
        passed[name] = passed.get(name, True) and not list(case.iter("failure")) and not list(case.iter("error"))
    return passed, done.stdout + done.stderr


def write(folder, name, source, outputs, tags):
    cell = v4.new_code_cell(source, execution_count=1, outputs=outputs, metadata={"tags": tags} if tags else {})
    nbformat.write(v4.new_notebook(cells=[cell]), folder / f"{name}.ipynb")


@pytest.fixture(scope="module", params=[True, False], ids=["repaired", "as it comes"])
def results(request, tmp_path_factory):
    """The outcome of every cell, each in a notebook of its own."""
    folder = tmp_path_factory.mktemp("nbval")
    for name, (source, outputs, tags, *_) in CELLS.items():
        write(folder, name, source, outputs, tags)
    return request.param, *run_nbval(folder, *(f"{name}.ipynb" for name in CELLS), repaired=request.param)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_passes_when_it_should(results, name):
    repaired, passed, printed = results
    assert passed[name] == CELLS[name][3 if repaired else 4], printed[-4000:]


def test_a_dead_kernel_is_noticed_at_once(tmp_path):
    write(tmp_path, "dead", "import os; os._exit(1)", [], [])
    begin = time.monotonic()
    passed, printed = run_nbval(tmp_path, "dead.ipynb", limit=100)
    assert passed == {"dead": False}
    assert "the kernel died while it ran this cell" in printed
    assert time.monotonic() - begin < 50
