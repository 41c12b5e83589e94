"""A run of tests that is ended from outside leaves no process."""

import signal
import subprocess
import sys
import time

import psutil
import pytest
from project import environment, python_path

from mpdemo.paths import root

# a test that waits for a process of a session of its own, as a kernel is
TEST = """
import subprocess, pathlib

def test_waits():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    pathlib.Path("child").write_text(str(child.pid))
    child.wait()
"""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_what_a_test_has_started_ends_with_the_run(workers, tmp_path):
    (tmp_path / "test_waits.py").write_text(TEST)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "ending",
        "-n",
        "1",
        "--rootdir",
        str(tmp_path),
        "test_waits.py",
    ]
    env = environment(root()) | {"PYTHONPATH": python_path(root(), root() / "tests")}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 60
        while not (tmp_path / "child").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
