"""A run of tests that is ended from outside leaves no process."""

import signal
import subprocess
import sys
import time

import psutil
from project import environment, python_path
from worker_jobs import until

from mpdemo.paths import root

# a test that waits for a process of a session of its own, as a kernel is
TEST = """
import subprocess, pathlib

def test_waits():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    pathlib.Path("child").write_text(str(child.pid))
    child.wait()
"""


def test_what_a_test_of_a_worker_has_started_ends_with_the_run(tmp_path):
    (tmp_path / "test_waits.py").write_text(TEST)
    words = [sys.executable, "-m", "pytest", "-p", "ending", "-n", "1", f"--rootdir={tmp_path}"]
    env = environment(root()) | {"PYTHONPATH": python_path(root(), root() / "tests")}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as run:
        until((tmp_path / "child").exists)
        time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
