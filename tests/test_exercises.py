"""Every exercise has a learner's cell, a solution that its check accepts, and wrong answers that its check refuses."""

import importlib
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from mpdemo.exercises import run
from mpdemo.exercises.check import EXERCISES, MODULES, is_blank, verdict
from mpdemo.paths import root

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
    monkeypatch.setattr(run, "SECONDS", 5.0)
    answer = ANSWERS[number][index]
    if isinstance(answer, str) and "\n" in answer:  # a program
        answer = save(tmp_path, answer)
    assert not is_blank(answer)
    state, message = verdict(number, answer)
    assert state == "wrong", message
    assert len(message.splitlines()) == 1 and "This answer cannot be used" not in message, message


def save(folder, text) -> Path:
    path = folder / ("answer.sbatch" if text.startswith("#!") else "answer.py")
    path.write_text(text)
    return path


def test_no_rank_outlives_a_killed_kernel(tmp_path):
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
        assert len(ranks) >= 2
    finally:
        kernel.kill()
        kernel.wait()
    assert not psutil.wait_procs(ranks, timeout=60)[1]
