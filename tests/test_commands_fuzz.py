"""Values of every kind for every option of every command: taken, or refused in one line; and nothing is left behind.

What would begin to work (processes, jobs, clusters, measuring) is replaced, so that only the front doors are tried.
"""

import argparse
import importlib

import pytest

from mpdemo.__main__ import COMMANDS, main
from mpdemo.errors import Parser

VALUES = ["", " ", "\n", "a\nb", "\udcff", "x" * 300, "x" * 5000, "/" + "y/" * 3000, "9" * 20, "9" * 5000]
WORDS = "é １ {} %s ~ * = -1 0 1 3 1.5 inf -inf nan 1e999 0x10 1,2 , 1,,2 True None auto mnist GPipe 16GiB .. /"
VALUES += [*WORDS.split(), "/dev/null", "/dev/full/x", "a:b", ":", "a.toml"]
INSIDE = [value for value in VALUES if "/" not in value and ".." not in value]
BEGINNINGS = {  # what a command calls when its input is good
    "demo": ["start", "take_devices"],
    "train": ["import_pytorch", "prepare_signals"],
    "plan": ["answer"],
    "env": ["findings"],
    "cluster": ["Cluster.up"],
    "render": ["problems_in"],
    "rehearse": ["run_trials"],
}
NEEDED = {"train": ["--rung", "ddp"], "plan": ["--devices", "2", "--gpu-memory", "16GiB"], "explain": ["log"]}


class Begun(Exception):
    """The input was good."""


def begin(*args, **more):
    raise Begun


def parsers(command):
    """The words that lead to a parser, and the parser: of a command, or of each of its actions."""
    parser = Parser(prog=command)
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [([command, name], sub) for action in actions for name, sub in action.choices.items()] or [
        ([command], parser)
    ]


def command_lines(command):
    """A command line for each option or argument with each value."""
    for words, parser in parsers(command):
        positional = [action for action in parser._actions if not action.option_strings]
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            for value in VALUES if "--out" not in action.option_strings else INSIDE:  # no file is written elsewhere
                given = [f"{action.option_strings[0]}={value}"] if action.option_strings else [value]
                needed = NEEDED.get(command, []) if action not in positional else []
                yield [*words, *needed, *given]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_value_of_an_option_ends_in_a_traceback(command, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(COMMANDS[command][0])
    for name in BEGINNINGS.get(command, []):
        monkeypatch.setattr(f"{module.__name__}.{name}", begin)
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "log").write_text("done\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("mpdemo.paths.root", lambda: folder)
    takes_out = any("--out" in action.option_strings for _, parser in parsers(command) for action in parser._actions)
    for words in command_lines(command):
        if takes_out and not any(word.startswith("--out") for word in words):
            words += ["--out", "out"]
        try:
            status = main(words)
        except Begun:
            status = 0
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr().err
        assert status in (0, 1, 2) and "Traceback" not in said, (words, status)
        if status == 2:
            assert said.startswith("mpdemo: error: ") and said.count("\n") == 1 and len(said) < 1500, (words, said)
    assert {path.name for path in tmp_path.iterdir()} == {"here"}
    assert {path.name for path in folder.iterdir()} <= {"log", "out", "slurm", "runs", *VALUES}
