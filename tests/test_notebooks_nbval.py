"""Every repair of notebooks/conftest.py, tried on the real nbval: with it, and without it.

The run without them says when a repair is no longer needed: then the test fails, and the repair can go.
"""

import shutil
import xml.etree.ElementTree as ElementTree

import nbformat
import pytest
from project import environment

from mpdemo.paths import root
from notebooks import run_nbval

v4 = nbformat.v4


def stream(text, name="stdout"):
    return v4.new_output("stream", name=name, text=text)


def picture(line, png="OLD="):
    return v4.new_output("display_data", data={"text/plain": line, "image/png": png})


# what a child prints takes a moment on its way through the kernel's pipe, and the cell may end before it
CHILD = (
    "import subprocess, sys, time\ndone = subprocess.run([sys.executable, '-c', 'print(3)'])\ntime.sleep(1)"
)
TRANSPORT = "from ipykernel.kernelapp import IPKernelApp; print(IPKernelApp.instance().transport)"
PICTURE = "display({'text/plain': 'a line', 'image/png': 'NEW='}, raw=True)"
UNKNOWN = stream("UsageError: Line magic function `%nosuchmagic` not found.\n", "stderr")
CELLS = {  # name: (source, saved outputs, passes with the repairs, passes without)
    "child_process": (CHILD, [stream("3\n")], True, False),
    "semicolon": ("1 + 1;", [], True, False),
    "unknown_magic": ("%nosuchmagic\nraise ValueError", [UNKNOWN], False, True),
    "says_it_is_a_test": ("import os; print(os.environ.get('NBVAL'))", [stream("1\n")], True, False),
    "channels_are_files": (TRANSPORT, [stream("ipc\n")], True, False),
    "wrong_number": ("print(3)", [stream("4\n")], False, False),
    "last_digits": ("print('loss 0.242108')", [stream("loss 0.242107\n")], True, True),
    "picture": (PICTURE, [picture("a line")], True, True),
    "picture_with_another_line": (PICTURE, [picture("b line")], False, False),
}
# the last cell; without the repair its whole time limit would pass
DEAD = ("import os; os._exit(1)", [], False)
LIMIT = 100  # s, of a cell


@pytest.mark.parametrize("repaired", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_cell_passes_when_it_should_and_a_dead_kernel_is_noticed_at_once(tmp_path, repaired):
    cells = CELLS | {"dead_kernel": DEAD} if repaired else CELLS
    written = [
        v4.new_code_cell(source, execution_count=1, outputs=outputs)
        for source, outputs, *_ in cells.values()
    ]
    nbformat.write(v4.new_notebook(cells=written), tmp_path / "cells.ipynb")
    if repaired:
        shutil.copy(root() / "notebooks" / "conftest.py", tmp_path)
    (tmp_path / "failed").mkdir()
    more = {"IPYTHONDIR": f"{tmp_path}/ipython", "MPDEMO_FAILED": f"{tmp_path}/failed"}
    options = f"--junitxml={tmp_path}/result.xml", f"--rootdir={tmp_path}"
    done = run_nbval("cells.ipynb", tmp_path, environment(root(), **more), LIMIT, LIMIT, *options)
    cases = ElementTree.parse(tmp_path / "result.xml").iter("testcase")
    passed = [not {"failure", "error"} & {part.tag for part in case} for case in cases]
    expected = {name: cell[2 if repaired else 3] for name, cell in cells.items()}
    assert dict(zip(cells, passed, strict=True)) == expected, done.stdout[-9000:]
    assert ("the kernel died while it ran this cell" in done.stdout) == repaired
    if repaired:  # what a failed cell printed is kept beside what the others should
        kept = nbformat.read(tmp_path / "failed" / "cells.ipynb", as_version=4).cells
        printed = [
            kept[list(cells).index(name)].outputs[0].text for name in ("wrong_number", "last_digits")
        ]
        assert printed == ["3\n", "loss 0.242107\n"]
