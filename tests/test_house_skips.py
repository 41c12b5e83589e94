"""In CI a skip fails the run and is named; elsewhere it does not."""

import os
import subprocess
import sys

import pytest

from mpdemo.paths import root

GOOD = (
    "import pytest\ndef test_it():\n    pass\n@pytest.mark.xfail\ndef test_that_is_expected_to_fail():\n    assert 0\n"
)
SKIPS = "import pytest\ndef test_one():\n    pytest.skip('no such program')\n"
SKIPPED_FILE = "import pytest\npytest.skip('no such module', allow_module_level=True)\n"


@pytest.mark.parametrize(
    ("ci", "files", "status"),
    [("true", [GOOD], 0), ("true", [GOOD, SKIPS, SKIPPED_FILE], 1), ("", [GOOD, SKIPS, SKIPPED_FILE], 0)],
    ids=["nothing skipped in CI", "skips in CI", "skips elsewhere"],
)
def test_exit_status(tmp_path, ci, files, status):
    for number, source in enumerate(files):
        (tmp_path / f"test_{number}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"CI": ci, "PYTHONPATH": str(root() / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stdout
    said = "ERROR: 2 skipped, and in CI none may be: test_2.py, test_1.py::test_one" in done.stdout
    assert said == (status == 1), done.stdout
