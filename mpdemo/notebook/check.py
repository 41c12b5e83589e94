"""Check a reader's answer to an exercise, and say one of three things: not answered, not yet, right.

In a notebook, ``check("50.2", answer)`` checks a value or a function. The cell magic ``%%task 22.2`` saves the cell as
``work/22.2.py`` and checks this file; ``%%task 11.3 sbatch`` saves ``work/11.3.sbatch``. An answer that still holds an
Ellipsis (``...``) is not answered yet. Neither raises an error, so a notebook runs from top to bottom as it is.

Every exercise is a row of ``notebooks/checks/NN.toml``. A row with ``right`` is a prediction. A row with ``processes``
is a program: ``test_NN_M`` of ``NN_programs.py`` runs after it in so many ranks. Any other answer goes to
``check_NN_M`` of ``NN_answers.py``, in the kernel.
What fails an assert isn't right yet; its message is for the reader.

PYTEST_DONT_REWRITE: pytest would add its own lines to the messages, since the package has a plugin for it.
"""

import ast
import importlib
import inspect
import math
import re
import sys
import textwrap
import tomllib
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython import get_ipython

from mpdemo.errors import UserError, error_line, text_of, wrapped
from mpdemo.paths import root, source

SECONDS = 20.0  # limit for a program; those of the exercises need about 1 s
BLANK = re.compile(r"(?:^|[\s=\"'])\.\.\.(?:[\s\"']|$)")  # but not the dots of echo "starting..."
TEST = """
import sys, types
sys.modules["checks"] = package = types.ModuleType("checks")
package.__path__ = [{folder!r}]
from checks.helpers import run_test
run_test({file!r}, {test!r}, globals())
"""


def checks() -> Path:
    """Return the folder of the checks: the project's, else the one that came with mpdemo."""
    places = (
        root() / "notebooks" / "checks",
        source() / "mpdemo" / "checks",
        source() / "notebooks" / "checks",
    )
    return next(folder for folder in places if folder.is_dir())


def exercises(notebook="") -> dict:
    """Return the rows of one notebook's exercises, or of all, by number."""
    rows = {}
    for file in sorted(checks().glob("[0-9][0-9].toml")):
        rows |= tomllib.loads(file.read_text())
    return {number: row for number, row in rows.items() if number.startswith(notebook)}


def check(number: str, answer: Any = ...) -> None:
    """Print whether an answer is right.

    Parameters
    ----------
    number : str
        Of the exercise: ``"50.2"``.
    answer
        A value or a function. Without it, the file of an earlier ``%%task`` is checked.
    """
    print(wrapped(f"{number}: {verdict(number, answer)[1]}"))


def verdict(number, answer=...) -> tuple[str, str]:
    """Return "open", "wrong" or "right", and a line that says why.

    Open: not answered, or it could not be tried here, which isn't the answer's fault.
    """
    if not __debug__:
        return (
            "open",
            "could not be tried: this kernel runs with python -O, which skips the asserts of the checks.",
        )
    row = _row(number)
    if answer is ...:
        answer = next(iter(sorted((root() / "work").glob(f"{number}.*"))), ...)
    if is_blank(answer):
        return "open", "not answered yet. Replace the ... and run this cell again."
    try:
        return "right", f"right. {_judge(number, row, answer) or row['then']}"
    except KeyboardInterrupt:
        return "open", "interrupted before it was judged. Run this cell again."
    except UserError as error:
        return "open", f"could not be tried: {error}."
    except Exception as error:  # the answer is the reader's: it may be of any kind
        if isinstance(error, AssertionError) and str(error):
            return "wrong", f"not yet. {error}"
        if isinstance(error, ModuleNotFoundError) and error.name.startswith(("torch", "checks.")):
            return "open", f"could not be tried: this kernel has no {error.name}; mpdemo env says more."
        return (
            "wrong",
            f"not yet. This answer cannot be used ({error_line(error)}); expected: {row['expects']}.",
        )


def _row(number) -> dict:
    rows, number = exercises(), text_of(number, "the number of an exercise, as '21.1',")
    if number not in rows:
        near = [known for known in rows if known[:2] == number[:2]] or rows
        raise UserError(f"there is no exercise {number!r}; this notebook has: {', '.join(near)}")
    return rows[number]


def _judge(number, row, answer):
    """Raise `AssertionError` for a wrong answer; return what follows from a right one where the row doesn't say it."""
    notebook, name = number[:2], number.replace(".", "_")
    if "processes" in row:
        return run_test(notebook, f"test_{name}", answer, row["processes"], row.get("seconds", SECONDS))
    if "right" not in row:
        return getattr(_answers(notebook), f"check_{name}")(answer)
    return judge_prediction(row, answer)


def _answers(notebook):
    """Import the functions that judge answers in the kernel."""
    package = sys.modules.setdefault("checks", ModuleType("checks"))
    package.__path__ = [str(checks())]
    return importlib.import_module(f"checks.{notebook}_answers")


def run_test(notebook, test, path, processes, seconds):
    """Run a program and then our test of it in real ranks; return what the test returns."""
    from mpdemo import ranks

    program = TEST.format(folder=str(checks()), file=str(checks() / f"{notebook}_programs.py"), test=test)
    results = ranks.run_program(path.read_text(), program, world_size=processes, timeout=seconds)
    for _, _, error in results:
        assert not error, error
    return results[0][1]


def judge_prediction(row, answer):
    """Raise `AssertionError` with the message of what is wrong with an answer, if anything is.

    ``right`` is a value or a list of them, ``within`` a relative tolerance. ``wrong`` holds pairs of a value ("*"
    stands for any part of a list) and its message; ``otherwise`` is a message for all else, or one for each part.
    ``choices`` are the allowed words. A message may hold ``{answer}``, or its parts ``{_0}``, ``{_1}`` and so on.
    """
    right, within = row["right"], row.get("within", 1e-9)
    wanted, parts = [right], [answer]
    if isinstance(right, list):
        wanted, parts = right, [answer] if isinstance(answer, str) else answer
    words = {"answer": answer} | {f"_{number}": part for number, part in enumerate(parts)}
    for part in parts if "choices" in row else []:
        assert part in row["choices"], f"{part!r} is none of: {', '.join(map(str, row['choices']))}."
    for value, message in row.get("wrong", []):
        assert not same(answer, value, within), message.format(**words)
    many = f"{len(parts)} part{'s' * (len(parts) != 1)}"
    assert len(parts) == len(wanted), f"This answer has {many} instead of {len(wanted)}."
    otherwise = row.get("otherwise", "{answer} isn't it.")
    messages = otherwise if isinstance(otherwise, list) else [otherwise] * len(parts)
    for part, value, message in zip(parts, wanted, messages, strict=True):
        assert same(part, value, within), message.format(**words)


def same(answer, value, within) -> bool:
    """Whether an answer is a value of a row: numbers within a relative tolerance; "*" stands for any part."""
    if isinstance(value, list):
        return len(answer) == len(value) and all(
            same(a, v, within) for a, v in zip(answer, value, strict=True)
        )
    if isinstance(value, str):
        return value in ("*", answer)
    return math.isclose(answer, value, rel_tol=within)


def is_blank(answer) -> bool:
    """Whether an answer still holds an Ellipsis: itself, one of its parts, or the text of a program or a function."""
    if isinstance(answer, list | tuple | dict):
        return any(is_blank(part) for part in (answer.values() if isinstance(answer, dict) else answer))
    if isinstance(answer, Path):
        return _has_blank(answer.read_text(), answer.suffix == ".py")
    if inspect.isfunction(answer):
        with suppress(OSError):  # its source is not known
            return _has_blank(textwrap.dedent(inspect.getsource(answer)), True)
    return answer is ...


def _has_blank(text, is_python) -> bool:
    if not is_python:
        return any(BLANK.search(line.partition("# ")[0]) for line in text.splitlines())
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return False  # the check itself reports it
    indices = {
        id(part) for node in nodes if isinstance(node, ast.Subscript) for part in ast.walk(node.slice)
    }
    return any(
        isinstance(node, ast.Constant) and node.value is ... and id(node) not in indices for node in nodes
    )


def save_task(line, cell):
    """Save a cell as the file of an exercise, and check it: the cell magic ``%%task NUMBER [SUFFIX]``."""
    if not line.split():
        raise UserError("%%task needs the number of an exercise, as in: %%task 22.2")
    number, suffix = (*line.split(), "py")[:2]
    path = root() / "work" / f"{number}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(cell)
    check(number, path)


if get_ipython():
    get_ipython().register_magic_function(save_task, "cell", "task")
