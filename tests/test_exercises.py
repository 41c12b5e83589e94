"""Every exercise has a learner's cell, a solution that its check accepts, and wrong answers that its check refuses."""

import functools
import linecache
import re
import runpy
import sys
import tomllib
from pathlib import Path

import documents
import nbformat
import pytest
from torch.utils.data import DataLoader

from mpdemo import ranks
from mpdemo.errors import COLUMNS, UserError
from mpdemo.labs.on_call import case
from mpdemo.notebook import check
from mpdemo.notebook.check import exercises, is_blank, save_task, verdict
from mpdemo.paths import root
from notebooks import sanitised

DEADLOCK = "still waits"  # said where a program hangs, after `PATIENCE` seconds; others may need longer
PATIENCE = 3.0
EXERCISES = exercises()
LONG = {"53.1", *exercises("64"), *exercises("80"), *exercises("81")}  # jobs, many runs: tried at night
PREDICTIONS = {number: row for number, row in EXERCISES.items() if "right" in row}
PROGRAMS = tomllib.loads((Path(__file__).parent / "wrong_programs.toml").read_text())
CELL = re.compile(r"""^(?:check\(\s*"([\d.]+)"|%%task ([\d.]+) ?(\w*)$)""", re.M)


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells if path.exists() else []
    return [cell for cell in cells if cell.cell_type == "code"]


def exercises_of(path) -> dict:
    """Return the printed output of every cell that checks an exercise, by number."""
    cells = [(match, cell) for cell in code_cells(path) for match in CELL.finditer(cell.source)]
    return {m[1] or m[2]: "".join(output.get("text", "") for output in cell.outputs) for m, cell in cells}


@pytest.mark.parametrize("path", documents.notebooks(), ids=lambda path: path.stem)
def test_every_exercise_stands_in_its_notebook_unanswered_and_in_its_solution(path):
    questions, solutions = exercises_of(path), exercises_of(path.parent / "solutions" / path.name)
    assert set(questions) == set(solutions) == set(exercises(path.name[:2]))
    for number in questions:
        assert f"{number}: not answered yet." in questions[number]


def test_every_exercise_has_wrong_answers_two_where_it_is_a_program():
    for number, row in EXERCISES.items():
        if number in PREDICTIONS:
            assert {"wrong", "otherwise"} & set(row), number
        else:
            assert len(PROGRAMS["wrong"][number]) >= 2


def numeric():
    """Return the number of a prediction whose answer is two numbers."""
    return next(number for number, row in PREDICTIONS.items() if row["expects"].startswith("two numbers"))


def filled(value, right):
    """Return a wrong value with the right parts in the place of its stars."""
    if not isinstance(value, list) or "*" not in value:
        return value
    return [own if part == "*" else part for part, own in zip(value, right, strict=True)]


def refused(number, answer, message):
    """Require that an answer is refused with a message of the row."""
    parts = answer if isinstance(answer, list) else [answer]
    said = message.format(answer=answer, **{f"_{n}": part for n, part in enumerate(parts)})
    assert verdict(number, answer) == ("wrong", f"not yet. {said}")


ROWS = [
    (number, value, message)
    for number, row in PREDICTIONS.items()
    for value, message in row.get("wrong", [])
]


@pytest.mark.parametrize(("number", "value", "message"), ROWS, ids=str)
def test_a_wrong_prediction_is_told_what_is_wrong_with_it(number, value, message):
    refused(number, filled(value, PREDICTIONS[number]["right"]), message)


@pytest.mark.parametrize("number", PREDICTIONS)
def test_a_right_prediction_is_accepted_and_others_are_refused(number):
    row = PREDICTIONS[number]
    right = row["right"]
    assert verdict(number, right) == ("right", f"right. {row['then']}")
    if isinstance(row.get("otherwise"), str) and isinstance(right, float):
        refused(number, right * 1.3456, row["otherwise"])
    if isinstance(right, list) and isinstance(right[0], str):
        assert verdict(number, right[0])[1].endswith(
            f"1 part instead of {len(right)}."
        )  # a word, not its letters
    assert verdict(number, [right, right])[0] == verdict(number, {"a": "b"})[0] == "wrong"


@pytest.fixture(autouse=True)
def no_answer_of_this_clone(tmp_path, monkeypatch):
    """81.4 and 81.5 then find no training script of whoever works in this clone, and leave no file for a picture.

    A case of 64 begins anew, with its clock at zero.
    """
    monkeypatch.setattr(case, "STARTED", {})
    check._answers("81")
    own_job = sys.modules["checks.own_job"]
    monkeypatch.setattr(own_job, "OWN", [tmp_path / name / "bard.py" for name in ("own", "solution")])
    monkeypatch.setattr(own_job, "JOBS", tmp_path / "jobs.json")


@functools.cache
def solved_cells() -> dict:
    """Return the cell of every exercise's solution, and the cells before it in its notebook."""
    cells = {}
    for path in sorted((root() / "notebooks" / "solutions").glob("*.ipynb")):
        before = []
        for cell in code_cells(path):
            if match := CELL.search(cell.source):
                cells[match[1] or match[2]] = cell.source, list(before)
            if not cell.source.startswith("%%"):
                before.append(cell.source)
    return cells


def answer_of(number, changes=(), folder=None):
    """Return the answer of a solution with some of its text replaced: what its cell gives to `check`, or a file."""
    source, before = solved_cells()[number]
    source += "\n"
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source, f"the solution of {number} holds no {old!r}"
        source = source.replace(old, new)
    if source.startswith("%%task"):
        head, _, text = source.partition("\n")
        path = folder / f"answer.{CELL.match(head)[3] or 'py'}"
        path.write_text(text)
        return path
    answers = {}
    names = {"check": lambda number, answer: answers.update({number: answer})}
    for text in [*before, source]:
        text = re.sub(r"^from mpdemo.notebook.check import check$", "", text, flags=re.M)
        linecache.cache[number] = len(text), None, text.splitlines(True), number
        exec(compile(text, number, "exec"), names)
    return answers[number]


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.nightly] * (number in LONG)) for number in EXERCISES],
)
def test_a_solution_is_right_and_what_is_said_to_it_was_saved(number, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    if number in ("81.4", "81.5"):  # which run the script of 81.3
        (tmp_path / "solution").mkdir()
        (tmp_path / "solution" / "bard.py").write_text(answer_of("81.3"))
    check.check(number, answer_of(number, folder=tmp_path))
    saved = exercises_of(next((root() / "notebooks" / "solutions").glob(f"{number[:2]}_*.ipynb")))[number]
    texts = (" ".join(text.split()) for text in (saved, capsys.readouterr().out))  # lines break elsewhere
    saved, said = (text.partition(f"{number}: ")[2] for text in texts)  # not what an answer printed before
    assert said.startswith("right.") and sanitised(said) == sanitised(saved)


@pytest.mark.nightly
def test_what_75_1_compares_with_is_what_lightning_does(monkeypatch):
    pl = pytest.importorskip(
        "lightning.pytorch", reason="pip install lightning: the check of 75.1 says what it does"
    )
    monkeypatch.syspath_prepend(root() / "notebooks")
    names = runpy.run_path(str(root() / "notebooks/checks/75_programs.py"))
    module, batches = names["task_75_1"]()

    class Lightning(names["Module"], pl.LightningModule):
        """The module of the check, as one of Lightning's."""

    lightning = Lightning()
    lightning.load_state_dict(module.state_dict())
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    words = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.3, "max_epochs": 1, "accelerator": "cpu"}
    pl.Trainer(**words, **quiet).fit(lightning, DataLoader(batches, batch_size=None))
    assert lightning.net.weight.equal(names["as_lightning"]()[0])


WRONG = [
    pytest.param(number, index, marks=[pytest.mark.nightly] if index or number in LONG else [])
    for number, rows in PROGRAMS["wrong"].items()
    for index in range(len(rows))
]
RIGHT = [(number, index) for number, rows in PROGRAMS["right"].items() for index in range(len(rows))]


@pytest.mark.parametrize(("number", "index"), WRONG, ids=str)
def test_a_wrong_program_is_told_what_is_wrong_with_it(number, index, tmp_path, monkeypatch):
    *changes, expected = PROGRAMS["wrong"][number][index]
    if DEADLOCK in expected:
        monkeypatch.setattr(check, "SECONDS", PATIENCE)
    answer = answer_of(number, changes, tmp_path)
    assert not is_blank(answer)
    state, message = verdict(number, answer)
    assert state == "wrong" and expected in message, message
    assert len(message.splitlines()) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "index"), RIGHT, ids=str)
def test_a_right_answer_may_be_written_otherwise(number, index, tmp_path):
    answer = answer_of(number, PROGRAMS["right"][number][index], tmp_path)
    state, message = verdict(number, answer)
    assert state == "right", message


def test_a_program_that_lacks_the_function_or_dies_is_told_so(tmp_path):
    (path := tmp_path / "answer.py").write_text("x = 1\n")
    assert "defines no MyDDP" in verdict("21.1", path)[1]
    path.write_text(
        "import os\nos.write(2, b'\\xff\\n')\n\n\ndef MyDDP(module, bucket_bytes):\n    os._exit(1)\n"
    )
    state, message = verdict("21.1", path)
    # the first that was seen to be gone
    assert state == "wrong" and re.search(r"Rank \d failed", message), message


def test_a_blank_a_number_in_quotes_and_an_unknown_exercise_are_told():
    number = numeric()
    assert {verdict(number, answer)[0] for answer in (..., (1, ...), {"a": ...}, [[1, ...]])} == {"open"}
    assert verdict(number, ("8", "9"))[1].endswith(f"; expected: {EXERCISES[number]['expects']}.")
    with pytest.raises(UserError, match=r"there is no exercise '21.99'; this notebook has: 21.1, "):
        verdict("21.99")
    with pytest.raises(UserError, match=r"there is no exercise '99.1'; this notebook has: \d"):
        verdict("99.1")


def test_what_cannot_be_tried_here_is_no_fault_of_the_answer(tmp_path, monkeypatch):
    def no_start(*_, **__):
        raise UserError("the ranks did not start; run this cell again")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "run_program", no_start)
    (path := tmp_path / "answer.py").write_text("def MyDDP(module, bucket_bytes):\n    return module\n")
    state, message = verdict("21.1", path)
    assert (state, message) == ("open", "could not be tried: the ranks did not start; run this cell again.")
    monkeypatch.setattr(ranks, "run_program", interrupted)
    assert verdict("21.1", path) == ("open", "interrupted before it was judged. Run this cell again.")
    monkeypatch.setattr(check, "_answers", lambda notebook: __import__("torch.nothing"))
    state, message = verdict("12.1", 1)
    assert state == "open" and "this kernel has no torch.nothing" in message


def test_a_task_is_saved_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPDEMO_ROOT", str(tmp_path))
    with pytest.raises(UserError, match="needs the number of an exercise"):
        save_task("", "print(1)\n")
    save_task("21.1", "def replicate(model, *copies):\n    ...\n")
    number = numeric()
    check.check(number, PREDICTIONS[number]["right"])
    check.check(number, (-5.0, 1.0))
    saved = tmp_path / "work" / "21.1.py"
    assert saved.read_text().startswith("def replicate")
    saved.rename(saved.with_name("21_1.py")).write_text("pass")  # of an edition that numbered otherwise
    assert verdict("21.1")[0] == "open"
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= COLUMNS for line in lines)
    said = [line[:12] for line in lines if line[2:3] == "."]  # the others continue a long one
    assert said == ["21.1: not an", f"{number}: right.", f"{number}: not ye"]
