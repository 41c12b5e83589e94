"""Every repair of notebooks/conftest.py, tried on the real nbval: with it, and without it.

The run without them says when a repair is no longer needed: then the test fails, and the repair can go.
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


def picture(line, png="OLD="):
    return v4.new_output("display_data", data={"text/plain": line, "image/png": png})


CHILD = "import subprocess, sys\ndone = subprocess.run([sys.executable, '-c', 'print(3)'])"
PICTURE = "display({'text/plain': 'a line', 'image/png': 'NEW='}, raw=True)"
UNKNOWN = stream("UsageError: Line magic function `%nosuchmagic` not found.\n", "stderr")
CELLS = {  # name: (source, saved outputs, passes with the repairs, passes without)
    "child_process": (CHILD, [stream("3\n")], True, False),
    "semicolon": ("1 + 1;", [], True, False),
    "unknown_magic": ("%nosuchmagic\nraise ValueError", [UNKNOWN], False, True),
    "says_it_is_a_test": ("import os; print(os.environ.get('NBVAL'))", [stream("1\n")], True, False),
    "wrong_number": ("print(3)", [stream("4\n")], False, False),
    "wrong_time": ("print('3.1 s')", [stream("4.25 s\n")], True, True),
    "wrong_digits": ("print('loss 3.1')", [stream("loss 3.2\n")], False, False),
    "picture": (PICTURE, [picture("a line")], True, True),
    "picture_with_another_line": (PICTURE, [picture("b line")], False, False),
}


def run_nbval(folder, names, repaired=True, limit=60):
    """Run nbval on notebooks of `folder`; return whether each passed, and all it printed."""
    if repaired:
        shutil.copy(root() / "notebooks" / "conftest.py", folder)
    options = ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={limit}", f"--junitxml={folder}/result.xml"]
    options += ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    options += [f"--nbval-sanitize-with={root()}/tests/nbval.cfg", *(f"{name}.ipynb" for name in names)]
    where = {"cwd": folder, "env": environment(root()) | {"IPYTHONDIR": str(folder / "ipython")}, "timeout": 240}
    done = subprocess.run([sys.executable, "-m", "pytest", *options], **where, capture_output=True, text=True)
    cases = list(ElementTree.parse(folder / "result.xml").iter("testcase"))
    failed = [case.get("classname") for case in cases if {"failure", "error"} & {part.tag for part in case}]
    return {name: not any(name in said.split(".") for said in failed) for name in names}, done.stdout + done.stderr


def write(folder, name, source, outputs):
    cell = v4.new_code_cell(source, execution_count=1, outputs=outputs)
    nbformat.write(v4.new_notebook(cells=[cell]), folder / f"{name}.ipynb")


@pytest.mark.parametrize("repaired", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_cell_passes_when_it_should(tmp_path, repaired):
    for name, (source, outputs, *_) in CELLS.items():
        write(tmp_path, name, source, outputs)
    passed, printed = run_nbval(tmp_path, CELLS, repaired)
    assert passed == {name: cell[2 if repaired else 3] for name, cell in CELLS.items()}, printed[-9000:]


def test_a_dead_kernel_is_noticed_at_once(tmp_path):
    write(tmp_path, "dead", "import os; os._exit(1)", [])
    begin = time.monotonic()
    passed, printed = run_nbval(tmp_path, ["dead"], limit=100)
    assert passed == {"dead": False} and "the kernel died while it ran this cell" in printed
    assert time.monotonic() - begin < 50
