"""Hostile input: whatever a command or a notebook's function is given, it answers, or refuses it in one line.

The commands and their options are read from the command line itself, so a new one is included. What would start a
process has taken what it was given; there the call ends, so that hundreds of them take seconds.
"""

import argparse
import asyncio
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
from multiprocessing import forkserver, util
from pathlib import Path

import hostile
import psutil
import pytest

from mpdemo.__main__ import COMMANDS, main, parser_of
from mpdemo.errors import UserError
from mpdemo.labs.on_call.case import Case, on_call
from mpdemo.measure import traces
from mpdemo.notebook import course
from mpdemo.world import warm

SECONDS = 10
WORDS = """
. .. / ../../gone gone ~ a[b] {} %s * = : a:b é １ , 1,,2 None auto mnist a.sbatch $(id) - --
nan inf -inf -1 0 1 3 1.5 1e999 0x10 16GiB /dev/zero /dev/null /dev/full/x
"""
TEXTS = [
    *WORDS.split(),
    "",
    " ",
    "\n",
    "a\nb",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202eevil",
    "<img src=x>",
    "\udcff",
]
TEXTS += ["9" * 20, "9" * 5000, "x" * 300, "x" * 5000, "/" + "y/" * 3000]
VALUES = [None, True, float("nan"), float("inf"), -1, 10**30, [], ["a", 1], {"a": 1}, b"\0", "\0", object()]
RECORD = {"id": "9", "where": "this machine", "script": "s", "spec": {"name": "\x1b[2J"}}  # of a job
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")  # what a terminal would act on


class Started(BaseException):
    """A process would start now."""


class Hangs(BaseException):
    """There was no answer in time."""


@pytest.fixture(scope="module")
def above(tmp_path_factory):
    """A folder of hostile files, and below it the folder to work in."""
    above = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(above)  # the name of a socket must be short
        hostile.files(above)
    (above / "run[a]").mkdir()
    (above / "run[a]/job.json").write_text(json.dumps(RECORD))
    os.mkfifo(above / "a folder/slurm-1.out")
    (above / "another owner's").write_text("{}")
    if os.geteuid() == 0:
        os.chown(above / "another owner's", 12345, 12345)
    (above / "work").mkdir()
    (above / "work/train.py").write_text("print(1)")  # of the commands' examples
    (above / "work/my_file.py").write_text(
        "import torch\ndef my_function():\n    return torch.nn.Linear(4096, 8)"
    )
    return above


@pytest.fixture
def call(above, monkeypatch, no_slurm, capfd):
    """Return what calls a function in the folder; it returns what was wrong, in words, and nothing if all was well."""

    def start(*_, **__):
        raise Started

    def late(*_):
        raise Hangs

    monkeypatch.chdir(above / "work")
    monkeypatch.setenv("MPDEMO_ROOT", str(above / "work"))
    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    monkeypatch.setattr(util, "spawnv_passfds", start)
    # what an earlier test has started would start a job without these
    monkeypatch.setattr(warm, "SERVERS", {})
    monkeypatch.setattr(forkserver, "connect_to_new_process", start)
    for name in "fork", "execve", "execvpe", "posix_spawn":
        monkeypatch.setattr(os, name, start)
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        before, processes = signal.signal(signal.SIGALRM, late), psutil.Process().children(recursive=True)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        yield lambda function, *words: wrong(above, capfd, function, *words)
        # `train` blocks a signal, which children would inherit
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGALRM, before)
        assert {*psutil.Process().children(recursive=True)} <= {*processes}


def there(above) -> dict:
    """Return the kind and the size of each file."""
    return {path: (path.lstat().st_mode, path.lstat().st_size) for path in above.rglob("*")}


def wrong(above, capfd, function, *words) -> str:
    """Return what is wrong with a call's answer or refusal, and with what it left behind."""
    files, result, refusal = there(above), None, ""
    capfd.readouterr()
    signal.alarm(SECONDS)
    try:
        result = function(*words)
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
    except UserError as error:
        (refusal,) = error._render_traceback_()  # as a notebook shows it
    except Started:
        pass
    except SystemExit as end:
        result = end.code
    except (Exception, Hangs) as error:
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.alarm(0)
    said, refused = capfd.readouterr()
    if getattr(function, "__name__", "") == "main" and result not in (0, 2, None):
        return f"exit status {result}: {refused}"
    if result == 2 and not re.fullmatch(r"mpdemo: error: .{1,1500}\n", refused):
        return f"no single line: {refused}"
    if UNSEEN.search(said + refused + refusal):
        return f"printed {said + refused + refusal!r}"
    if "<img src=x>" in getattr(result, "data", {}).get("text/html", ""):
        return "HTML that was not escaped"
    now, own = there(above), [above / "work", *outputs(above, words)]
    if spoilt := [path for path in files if now.get(path) != files[path] and path not in own]:
        return f"changed or deleted {spoilt}"
    made = now.keys() - files.keys()
    strayed = [path for path in made if not any(path.is_relative_to(place) for place in own)]
    for path in sorted(made, reverse=True):  # the next call finds what this one has found
        if not path.is_relative_to(above / "work"):
            path.rmdir() if path.is_dir() else path.unlink()
    return f"made {strayed}" if strayed else ""


def outputs(above, words) -> list:
    """Return where a command line says that its result goes: what is written there was asked for."""
    line = words[0] if words and isinstance(words[0], tuple) else ()
    given = (word.partition("=") for word in line)
    named = [
        value for name, _, value in given if name in ("--out", "--json") and value and "\0" not in value
    ]
    return [Path(os.path.normpath(above / "work" / value)) for value in named]


def inputs(above) -> list:
    return [*TEXTS, *(f"../{path.name}" for path in sorted(above.iterdir()) if path.name != "work")]


def command_lines(name, values):
    """Yield the example of a command's help, with each of the values at each place that takes one."""
    parser, example = parser_of(name)[1], shlex.split(COMMANDS[name][2])
    first = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            first, parser, example = example[:1], action.choices[example[0]], example[1:]
    for action in parser._actions:
        if action.nargs == 0:
            continue
        words, names = list(example), action.option_strings
        at = next((at for at, word in enumerate(words) if word in names), None)
        if names and at is not None:
            del words[at : at + 2]
        script = words.index("--") + 1 if "--" in words else len(words) - 1
        for value in values:
            given = (
                [f"{names[-1]}={value}", *words]
                if names
                else [*words[:script], value, *words[script + 1 :]]
            )
            yield (name, *first, *given)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_or_refuses_in_one_line(name, above, call):
    said = {words: call(main, words) for words in command_lines(name, inputs(above))}
    assert not {words: fault for words, fault in said.items() if fault}


def run_with(value):
    return course.run(f"python {shlex.quote(value)}" if isinstance(value, str) else value)


def run_as(value):
    return course.run("python train.py", name=value)


def run_on(value):
    return course.run("python train.py", nodes=value)


def answered(value):
    return course.check("21.1", value)


def asked(value):
    return Case(b"sealed").ask(value)


# which takes nothing
OF_A_NOTEBOOK = [getattr(course, name) for name in course.__all__ if name != "ladder"]
OF_A_NOTEBOOK += [run_with, run_as, run_on, answered, on_call, asked, traces.read]


@pytest.mark.parametrize("function", OF_A_NOTEBOOK, ids=lambda function: function.__name__)
def test_a_function_of_a_notebook_answers_or_refuses_in_one_line(function, above, call):
    said = {repr(value)[:60]: call(function, value) for value in VALUES + inputs(above)}
    assert not {value: fault for value, fault in said.items() if fault}
