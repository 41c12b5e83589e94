"""Every exercise has a learner's cell, a solution that its check accepts, and wrong answers that its check refuses."""

import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from right_answers import RIGHT

from mpdemo.errors import UserError
from mpdemo.exercises import run
from mpdemo.exercises.check import EXERCISES, MODULES, Wrong, is_blank, save_task, verdict
from mpdemo.exercises.checkpoint_runs import drive_atomic
from mpdemo.paths import root
from mpdemo.world.processes import start_time

for module in MODULES.values():
    importlib.import_module(f"mpdemo.exercises.{module}")
ANSWERS = {
    number: answers
    for module in MODULES.values()
    for number, answers in importlib.import_module(f"wrong_answers.{module}").WRONG.items()
}
WRONG = [(number, index) for number, answers in sorted(ANSWERS.items()) for index in range(len(answers))]
CELL = re.compile(r"""^(?:check\(\s*"([\d.]+)"|%%task ([\d.]+))""", re.M)


def exercises_of(path) -> dict:
    """Return the printed output of every cell that checks an exercise, by number."""
    outputs = {}
    for cell in nbformat.read(path, as_version=4).cells:
        for groups in CELL.findall(cell.source) if cell.cell_type == "code" else []:
            outputs["".join(groups)] = "".join(output.get("text", "") for output in cell.outputs)
    return outputs


def learner_notebooks():
    return sorted((root() / "notebooks").glob("*.ipynb"))


def test_the_course_has_forty_exercises():
    assert len(EXERCISES) >= 40


@pytest.mark.parametrize("path", learner_notebooks(), ids=lambda path: path.stem)
def test_every_exercise_stands_in_its_notebook_unanswered_and_in_its_solution_right(path):
    checks = {number for number in EXERCISES if number.startswith(path.name[:2])}
    questions, solutions = exercises_of(path), exercises_of(path.parent / "solutions" / path.name)
    assert set(questions) == set(solutions) == checks
    assert len(checks) >= 4
    for number in checks:
        assert f"{number}: not answered yet." in questions[number]
        assert f"{number}: right." in solutions[number]


@pytest.mark.parametrize("number", sorted(EXERCISES))
def test_every_exercise_has_two_wrong_answers(number):
    assert len(ANSWERS[number]) >= 2


@pytest.mark.parametrize(("number", "index"), WRONG, ids=str)
def test_a_wrong_answer_is_refused(number, index, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS", 3.0)
    answer = saved(tmp_path, ANSWERS[number][index])
    assert not is_blank(answer)
    state, message = verdict(number, answer)
    assert state == "wrong", message
    assert len(message.splitlines()) == 1 and "This answer cannot be used" not in message, message


def saved(folder, answer):
    """Return the path of an answer that is a program, which is saved first; any other answer as it is."""
    is_program = isinstance(answer, str) and "\n" in answer
    return save(folder, answer) if is_program else answer


def save(folder, text) -> Path:
    path = folder / ("answer.sbatch" if text.startswith("#!") else "answer.py")
    path.write_text(text)
    return path


@pytest.fixture
def temporary(monkeypatch):
    """A folder for the temporary files of processes that start now, short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="mp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_no_rank_and_no_folder_outlives_a_killed_kernel(tmp_path, temporary):
    program, started = tmp_path / "waits.py", tmp_path / "started"
    program.write_text(f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(300)\n")
    call = "import sys, pathlib; from mpdemo.exercises.run import run_on_ranks; run_on_ranks(pathlib.Path(sys.argv[1]))"
    kernel = subprocess.Popen([sys.executable, "-c", call, str(program)], cwd=root())
    try:
        end = time.monotonic() + 120
        while not started.exists():
            assert kernel.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        ranks = psutil.Process(kernel.pid).children(recursive=True)
        assert len(ranks) >= 2 and list(temporary.glob("mpdemo-exercise-*"))
    finally:
        kernel.kill()
        kernel.wait()
    assert not psutil.wait_procs(ranks, timeout=60)[1]
    assert not list(temporary.glob("mpdemo-exercise-*"))


def test_the_first_check_does_not_wait_for_an_import_without_end(tmp_path, temporary):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3)\n")
    started = tmp_path / "started"
    program = save(tmp_path, f"import pathlib\npathlib.Path({str(started)!r}).touch()\n")
    call = f"""import time
from mpdemo.exercises import run
run._FORKING.set_forkserver_preload(["slow"])
run.IMPORT_SECONDS = 1.0
try:
    run.run_on_ranks(run.Path({str(program)!r}))
except run.UserError as error:
    print(error)
time.sleep(5)
"""
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": f"{root()}:{tmp_path}"}, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, **options)
    assert done.stdout == "PyTorch was not imported within 1 s; run this cell again\n", done.stderr
    assert not started.exists() and not list(temporary.glob("mpdemo-exercise-*"))


def test_an_interrupt_ends_the_ranks_that_have_started(tmp_path, monkeypatch):
    start, started = run._start, []

    def start_one(*arguments):
        if started:
            raise KeyboardInterrupt
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(run, "_start", start_one)
    with pytest.raises(KeyboardInterrupt):
        run.run_on_ranks(save(tmp_path, "import time\ntime.sleep(300)\n"))
    assert not started[0].is_alive()


def test_a_save_that_never_ends_goes_with_its_rank(tmp_path):
    number = tmp_path / "number"
    program = f"""import os, pathlib, time, torch


def save(state, path):
    if state["step"] == 2:
        pathlib.Path({str(number)!r}).write_text(str(os.getpid()))
        time.sleep(300)
    torch.save(state, path)
"""
    with pytest.raises(Wrong, match="After 3 s"):
        run.run_on_ranks(save(tmp_path, program), drive_atomic, processes=1, seconds=3)
    end = time.monotonic() + 10
    while start_time(int(number.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_rank_that_dies_leaves_no_file(tmp_path):
    noted = tmp_path / "noted"
    program = f"import os\n\n\ndef load(path):\n    open({str(noted)!r}, 'w').write(str(path))\n    os._exit(1)\n"
    state, message = verdict("10.8", save(tmp_path, program))
    assert state == "wrong" and "ended without a message" in message
    assert not Path(noted.read_text()).parent.exists()


@pytest.mark.parametrize(("number", "index"), [(n, i) for n, answers in RIGHT.items() for i in range(len(answers))])
def test_a_right_answer_may_be_written_otherwise(number, index, tmp_path):
    state, message = verdict(number, saved(tmp_path, RIGHT[number][index]))
    assert state == "right", message


def test_an_option_may_have_an_equals_sign(tmp_path):
    train = (
        "srun python -m mpdemo train --rung=ddp --model transformer --batch-size=64 --optimizer=adamw \\\n  --epochs 4"
    )
    job = f"#!/bin/bash\n#SBATCH --ntasks-per-node=4\n{train}\necho done\n"
    assert verdict("11.8", save(tmp_path, job))[0] == "right"
    state, message = verdict("11.8", save(tmp_path, job.replace("--epochs", "--epoch-count")))
    assert state == "wrong" and "knows no --epoch-count 4" in message


def test_a_rank_that_prints_bytes_and_dies_is_no_fault_of_the_check(tmp_path):
    program = "import os\nos.write(2, b'\\xff\\n')\n\n\ndef mean(tensor, rank, world_size):\n    os._exit(1)\n"
    state, message = verdict("03.2", save(tmp_path, program))
    assert state == "wrong" and "Rank 0 failed" in message, message


def test_what_a_script_refuses_is_told_in_its_own_words():
    state, message = verdict("05.13", "--cut=3 6")
    assert state == "wrong" and "error: unrecognized arguments: 6" in message, message


def test_task_without_a_number_says_what_it_needs():
    with pytest.raises(UserError, match="needs the number of an exercise"):
        save_task("", "print(1)\n")


def test_a_slow_start_is_no_fault_of_the_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "START_SECONDS", -1.0)
    state, message = verdict("03.2", save(tmp_path, "def mean(tensor, rank, world_size):\n    return tensor\n"))
    assert state == "open" and message.startswith("could not be tried: rank 0 was not ready"), message
