"""The labs run from wherever you work."""

import multiprocessing
import re
import subprocess
import sys
import time
import types

import pytest
from project import inherited, python_path

from mpdemo.labs import first_job, two_devices
from mpdemo.paths import root

HELLO = """
echo once
srun --label bash -c 'echo rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS, local rank $SLURM_LOCALID'
"""


def output(folder, *words):
    """What ``python WORDS`` prints in a folder."""
    environ = inherited("MPDEMO_ROOT") | {"PYTHONPATH": python_path(root())}
    return subprocess.check_output([sys.executable, *words], cwd=folder, env=environ, text=True, timeout=60)


def test_a_lab_runs_in_any_folder_and_ones_own_comes_first(tmp_path):
    assert output(tmp_path, "-m", "mpdemo.labs.hello").startswith("rank 0 of 1")
    own = tmp_path / "notebooks" / "labs" / "hello.py"
    own.parent.mkdir(parents=True)
    own.write_text('print("changed")\n')
    assert output(tmp_path, "-m", "mpdemo.labs.hello") == "changed\n"


@pytest.mark.parametrize("place", ["cluster no_cluster", "slurm_programs", "no_cluster"])
def test_a_first_batch_script_runs_on_a_slurm_in_reach_on_a_throw_away_one_and_in_bash(
    place, tmp_path, monkeypatch, request
):
    monkeypatch.setenv("MPDEMO_ROOT", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    for fixture in place.split():
        request.getfixturevalue(fixture)
    lines = first_job.submit("hello", HELLO).splitlines()
    numbers = [f"{rank}: rank {rank} of 4, local rank {rank % 2}" for rank in range(4)]
    assert lines[0] == "once" and sorted(lines[1:]) == numbers
    said = first_job.terminal("scontrol --version")
    assert said.startswith("$ scontrol --version\nslurm") or (place == "no_cluster" and not said)


def test_the_package_imports_no_lab():
    """What both need is in the package; a lab is started as a program."""
    labs = "|".join(path.stem for path in (root() / "notebooks/labs").glob("*.py"))
    for file in (root() / "mpdemo").rglob("*.py"):
        assert not re.search(rf"(?:from|import) mpdemo\.labs\.(?:{labs})\b", file.read_text()), file


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
