"""Processes are told apart by number and start time, and end for certain."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from worlds import run_worlds

from mpdemo.world.processes import child_environment, end_processes, is_running, start_time

DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
)
KEEPS_A_ZOMBIE = (
    "import subprocess, time; p = subprocess.Popen(['true']); print(p.pid, flush=True); time.sleep(60)"
)
CLEANS_UP = """
import os, signal, sys
from mpdemo.world.processes import clean_up_on_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
clean_up_on_signals()
try:
    os.kill(os.getpid(), int(sys.argv[1]))
finally:
    os.kill(os.getpid(), signal.SIGHUP)
    print("clean")
"""


TRIES_TO_TAKE_THE_PORT = """
import os, socket
try:
    socket.socket().bind(("", int(os.environ["MASTER_PORT"])))
    print("taken")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def start():
    """Start Python programs; each has printed its first line when it is returned. All are ended afterwards."""
    children = []

    def start(program):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child, child.stdout.readline()

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_a_process_that_ignores_sigterm_is_killed(start):
    child, _ = start(DEAF)
    end_processes([(child.pid, start_time(child.pid))], signal.SIGTERM, seconds=0.2)
    assert start_time(child.pid) is None


def test_another_process_of_the_same_number_is_left_alone(start):
    child, _ = start(DEAF)
    end_processes([(child.pid, start_time(child.pid) - 1)], signal.SIGKILL)
    assert child.poll() is None


def test_a_zombie_of_another_process_counts_as_ended(start):
    """A daemon's new parent may never read its exit status; nobody must wait for that."""
    pid = int(start(KEEPS_A_ZOMBIE)[1])
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    numbers = [(pid, None), (pid, psutil.Process(pid).create_time())]
    end_processes(numbers, signal.SIGTERM, seconds=10_000)  # more than the test itself is given
    assert start_time(pid) is None and not is_running(pid, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_process_that_cleans_up_first(number):
    """Also where a second one comes meanwhile, as when a connection is lost."""
    child = subprocess.run(
        [sys.executable, "-c", CLEANS_UP, str(int(number))], capture_output=True, text=True
    )
    assert child.returncode == 128 + number and child.stdout == "clean\n", child.stderr


def test_the_start_time_does_not_change_when_the_clock_is_set(monkeypatch):
    before, boot_time = start_time(os.getpid()), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 3600)
    monkeypatch.setattr("psutil.boot_time", lambda: boot_time + 3600)
    assert start_time(os.getpid()) == before


def test_nobody_else_gets_the_port_of_ranks_before_rank_0_listens(tmp_path):
    assert run_worlds(tmp_path, [[1, "-c", TRIES_TO_TAKE_THE_PORT]]) == "Address already in use\n"


def test_a_child_inherits_no_launcher(monkeypatch):
    for name in ("RANK", "SLURM_PROCID", "SLURM_CONF", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    environment = child_environment("SLURM_CONF")
    assert environment.keys() & {"RANK", "SLURM_PROCID", "SLURM_CONF", "MASTER_ADDR"} == {"SLURM_CONF"}
    assert environment["PATH"].split(":")[0] == os.path.dirname(sys.executable)
