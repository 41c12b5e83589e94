"""Check a reader's answer to an exercise, and say one of three things: not answered, not yet, right.

In a notebook, ``check("03.2", answer)`` checks a value or a function. The cell magic ``%%task 03.4`` saves the cell as
``work/03_4.py`` and checks this file; ``%%task 00.3 sbatch`` saves ``work/00_3.sbatch``. An answer that still holds an
Ellipsis (``...``) is not answered yet. Neither raises an error, so that a notebook runs from top to bottom as it is.
"""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

from IPython import get_ipython

from mpdemo.errors import UserError, did_you_mean, error_line
from mpdemo.exercises.progress import note_right
from mpdemo.paths import root

MODULES = {
    "00": "start_here",
    "01": "single_device",
    "02": "data_parallel",
    "03": "ddp",
    "04": "model_parallel",
    "05": "pipeline",
    "06": "hybrid",
    "07": "sharding",
    "08": "scaling",
    "09": "checkpoint",
    "10": "when_it_breaks",
    "11": "which_one",
    "12": "other_tools",
}
BLANK = re.compile(r"(?:^|[\s=\"'])\.\.\.(?:[\s\"']|$)")  # not that of echo "starting..."
EXERCISES = {}  # number -> check, of the notebooks that were asked for


class Wrong(Exception):
    """An answer that is not right. The message says what is wrong with it, and not what would be right."""


def require(condition, message):
    """Refuse an answer with a message, unless the condition holds."""
    if not condition:
        raise Wrong(message)


def exercise(number, expects):
    """Return a decorator that enters a check under its number.

    The check takes the answer (the path of the file, for a program), raises `Wrong`, and returns what follows from a
    right answer: one sentence.

    Parameters
    ----------
    number : str
        Notebook and exercise, such as ``"03.2"``.
    expects : str
        What kind of answer it takes: "a whole number", "a file that defines all_reduce(tensor)". Shown where the
        answer is of another kind.
    """

    def enter(function):
        function.expects = expects
        EXERCISES[number] = function
        return function

    return enter


def verdict(number, answer=...) -> tuple[str, str]:
    """Check an answer.

    Returns
    -------
    state : {"open", "wrong", "right"}
        Open: not answered, or it could not be tried here, which is no fault of the answer.
    message : str
        One line.

    Raises
    ------
    UserError
        There is no exercise of this number.
    """
    function = _exercise(number)
    answer = _file(number) or answer if answer is ... else answer
    if is_blank(answer):
        return "open", "not answered yet. Replace the ... and run this cell again."
    if isinstance(answer, str) and function.expects.startswith(("a number", "a whole number")):
        return "wrong", f"not yet. {answer!r} is a text; expected: {function.expects}, without quotes."
    try:
        return "right", f"right. {function(answer)}"
    except Wrong as wrong:
        return "wrong", f"not yet. {wrong}"
    except UserError as error:
        return "open", f"could not be tried: {error}."
    except Exception as error:  # the answer is the reader's: it may be of any kind
        return "wrong", f"not yet. This answer cannot be used ({error_line(error)}); expected: {function.expects}."


def check(number, answer=...):
    """Print whether an answer is right. Without an answer, the file of an earlier ``%%task`` is checked."""
    state, message = verdict(number, answer)
    print(f"{number}: {message}")
    if state == "right":
        note_right(number)


def _exercise(number):
    notebook = str(number).partition(".")[0]
    if notebook in MODULES:
        importlib.import_module(f"mpdemo.exercises.{MODULES[notebook]}")
    if number not in EXERCISES:
        known = [name for name in EXERCISES if name.startswith(notebook)] or [f"{name}.1" for name in MODULES]
        known.sort(key=lambda name: [*map(int, name.split("."))])
        hint = did_you_mean(number, known)
        raise UserError(f"there is no exercise {number!r}; this notebook has: {', '.join(known)}{hint}")
    return EXERCISES[number]


def _file(number) -> Path | None:
    """Return the file that the reader saved for an exercise, if there is one."""
    return next(iter(sorted((root() / "work").glob(f"{number.replace('.', '_')}.*"))), None)


def is_blank(answer) -> bool:
    """Whether an answer still holds an Ellipsis: itself, one of its parts, or the text of a program or a function."""
    if answer is ...:
        return True
    if isinstance(answer, list | tuple):
        return any(is_blank(part) for part in answer)
    if isinstance(answer, dict):
        return any(is_blank(part) for part in answer.values())
    if isinstance(answer, Path):
        return _has_blank(answer.read_text(), answer.suffix == ".py")
    if inspect.isfunction(answer):
        return _has_blank(textwrap.dedent(inspect.getsource(answer)), True)
    return False


def _has_blank(text, is_python) -> bool:
    if not is_python:
        return any(BLANK.search(line.partition("# ")[0]) for line in text.splitlines())
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return False  # the check itself reports it
    indices = {id(part) for node in nodes if isinstance(node, ast.Subscript) for part in ast.walk(node.slice)}
    return any(isinstance(node, ast.Constant) and node.value is ... and id(node) not in indices for node in nodes)


def save_task(line, cell):
    """Save a cell as the file of an exercise, and check it: the cell magic ``%%task NUMBER [SUFFIX]``."""
    if not line.split():
        raise UserError("%%task needs the number of an exercise, as in: %%task 03.4")
    number, suffix = (*line.split(), "py")[:2]
    _exercise(number)
    path = root() / "work" / f"{number.replace('.', '_')}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(cell)
    check(number, path)


if get_ipython():
    get_ipython().register_magic_function(save_task, "cell", "task")
