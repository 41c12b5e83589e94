"""The labs run from wherever you work."""

import multiprocessing
import os
import subprocess
import sys
import time
import types

import pytest
from project import python_path

from mpdemo.errors import UserError
from mpdemo.labs import first_job, two_devices
from mpdemo.paths import root

HELLO = """
echo once
srun --label bash -c 'echo rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS, local rank $SLURM_LOCALID'
"""


class Missing:
    """In the place of a cluster whose programs are missing."""

    def up(**_):
        raise UserError("no throw-away cluster without slurmd")


def output(folder, *words):
    """What ``python WORDS`` prints in a folder."""
    environ = {name: value for name, value in os.environ.items() if name != "MPDEMO_ROOT"} | {
        "PYTHONPATH": python_path(root())
    }
    run = {
        "cwd": folder,
        "env": environ,
        "capture_output": True,
        "text": True,
        "timeout": 60,
        "check": True,
    }
    return subprocess.run([sys.executable, *words], **run).stdout


def test_a_lab_runs_in_any_folder_and_ones_own_comes_first(tmp_path):
    assert output(tmp_path, "-m", "mpdemo.labs.hello").startswith("rank 0 of 1")
    own = tmp_path / "notebooks" / "labs" / "hello.py"
    own.parent.mkdir(parents=True)
    own.write_text('print("changed")\n')
    assert output(tmp_path, "-m", "mpdemo.labs.hello") == "changed\n"


@pytest.mark.parametrize("place", ["in reach", "throw-away", "bash alone"])
def test_a_first_batch_script_runs_on_any_slurm_or_in_bash(place, tmp_path, monkeypatch, request):
    if place == "throw-away":
        request.getfixturevalue("slurm_programs")
    else:
        monkeypatch.setattr(first_job, "Cluster", Missing)
    monkeypatch.setenv("MPDEMO_ROOT", str(tmp_path))
    if place == "in reach":
        request.getfixturevalue("cluster")
    else:
        monkeypatch.delenv("SLURM_CONF", raising=False)
    lines = first_job.submit("hello", HELLO).splitlines()
    numbers = [f"{rank}: rank {rank} of 4, local rank {rank % 2}" for rank in range(4)]
    assert lines[0] == "once" and sorted(lines[1:]) == numbers
    said = first_job.terminal("scontrol --version")
    assert said.startswith("$ scontrol --version\nslurm") or (place == "bash alone" and not said)


def test_the_package_imports_no_lab():
    """What both need is in the package; a lab is started as a program."""
    labs = [path.stem for path in (root() / "notebooks/labs").glob("*.py")]
    for file in (root() / "mpdemo").rglob("*.py"):
        words = file.read_text()
        named = [
            lab
            for lab in labs
            if f"from mpdemo.labs.{lab} " in words or f"import mpdemo.labs.{lab}" in words
        ]
        assert not named, f"{file} imports {named}"


def test_an_interrupt_ends_a_labs_processes_and_says_so(capfd):
    from mpdemo.labs.failures.crash import errors_of_processes

    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with errors_of_processes():
        child.start()
        raise KeyboardInterrupt
    assert not child.is_alive() and capfd.readouterr().out == "Interrupted: the processes were ended.\n"


def test_numbers_of_two_ranks_are_in_order_where_their_lines_ran_into_each_other(monkeypatch):
    said = "rank 1, epoch 0: 24 steps, loss 1.2rank 0, epoch 0: 24 steps, loss 1.1\n\nrank 0, sum of all weights: 8.1\n"
    job = types.SimpleNamespace(output=lambda fails: said)
    monkeypatch.setattr(two_devices, "run", lambda command: job)
    assert two_devices.torchrun(2, "x.py") == ([24, 24], [1.1, 1.2], [8.1])
