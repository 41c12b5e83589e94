"""The command line as people expect it: an overview, near misses named, every command with an example.

Last, values of every kind for every option of every command: taken, or refused in one line; and nothing is left behind.
"""

import argparse
import contextlib
from functools import partial

import pytest

from mpdemo.__main__ import COMMANDS, GROUPS, parser_of
from mpdemo.tools import terminal
from mpdemo.tools.plan import strategies


def test_alone_it_says_where_to_begin_and_with_help_it_shows_every_command_in_its_group(call_mpdemo):
    alone, asked = call_mpdemo(), call_mpdemo("--help")
    assert (alone.returncode, alone.stderr, asked.returncode, asked.stderr) == (0, "", 0, "")
    assert alone.stdout.count("\n") == 5 and "notebooks/10_two_devices.ipynb" in alone.stdout
    assert all(f"mpdemo {name} " in alone.stdout for name in ("same", "plan", "explain"))
    text = asked.stdout
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    assert all(f"\n  {name}" in text for name in COMMANDS) and all(
        f"\n{group}:\n" in text for group in GROUPS
    )
    assert call_mpdemo("--version").stdout.startswith("mpdemo ")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("pla", "'plan'"),
        ("--verison", "'--version'"),
        ("plan --devcies 2", "'--devices'"),
        ("env --stie x", "'--site'"),
    ],
)
def test_a_near_miss_is_named(call_mpdemo, words, near):
    done = call_mpdemo(*words.split())
    assert done.returncode == 2 and f"did you mean {near}?" in done.stderr
    assert (done.stdout + done.stderr).count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_a_sentence_an_example_and_the_exit_statuses(call_mpdemo, name):
    done = call_mpdemo(name, "--help")
    text = done.stdout
    assert done.returncode == 0 and COMMANDS[name][1][1:] in " ".join(text.split())
    assert f" {name} {COMMANDS[name][2]}".rstrip() in text and "exit status:" in text


def test_colours_and_short_lines_are_for_a_terminal_alone(monkeypatch):
    text, rows = (
        "  a verdict:\n    " + "word " * 30,
        [["->", "ddp", "yes", "1,000", "16", "2,000", "3.0", "4.0", "38%"]],
    )
    headers = [header.format(unit="images") for header, _ in strategies.COLUMNS.values()][:9]
    shown = partial(strategies._as_wide_as_the_terminal, rows, headers, ["left"] * 9)
    assert terminal.coloured("same", "green") == "same" and terminal.wrapped(text) == text
    assert shown().endswith("38%")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert terminal.coloured("same", "green") == "\x1b[32msame\x1b[0m"
    assert max(map(len, terminal.wrapped(text).splitlines())) <= 60
    assert terminal.wrapped(text).splitlines()[2].startswith("      word")
    *table, more = shown().splitlines()
    assert max(map(len, table)) <= 60
    assert more.endswith("also has: between (ms), MFU")
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.coloured("same", "green") == "same"


# --- values of every kind; what would begin to work (processes, jobs, clusters, measuring) is replaced

VALUES = ["", " ", "\n", "a\nb", "\udcff", "x" * 300, "x" * 5000, "/" + "y/" * 3000, "9" * 20, "9" * 5000]
WORDS = (
    "é １ {} %s ~ * = -1 0 1 3 1.5 inf -inf nan 1e999 0x10 1,2 , 1,,2 True None auto mnist GPipe 16GiB .. /"
)
VALUES += [*WORDS.split(), "/dev/null", "/dev/full/x", "a:b", ":", "a.sbatch"]
INSIDE = [value for value in VALUES if "/" not in value and ".." not in value]
BEGINNINGS = {  # what a command calls when its input is good
    "demo": ["check_room"],
    "plan": ["answer"],
    "env": ["findings"],
    "cluster": ["Cluster.up"],
    "render": ["check"],
    "rehearse": ["run_trials"],
}
NEEDED = {"plan": ["--devices", "2", "--gpu-memory", "16GiB"], "explain": ["log"]}


class Begun(Exception):
    """The input was good."""


def begin(*args, **more):
    raise Begun


def parsers(command):
    """The words that lead to a parser, and the parser: of a command, or of each of its actions."""
    _, parser = parser_of(command)
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
            # no file is written elsewhere
            for value in VALUES if "--out" not in action.option_strings else INSIDE:
                given = [f"{action.option_strings[0]}={value}"] if action.option_strings else [value]
                needed = NEEDED.get(command, []) if action not in positional else []
                yield [*words, *needed, *given]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_value_of_an_option_ends_in_a_traceback(command, tmp_path, monkeypatch, call_mpdemo):
    for name in BEGINNINGS.get(command, []):
        monkeypatch.setattr(f"{COMMANDS[command][0]}.{name}", begin)
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "log").write_text("done\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("mpdemo.paths.root", lambda: folder)
    takes_out = any(
        "--out" in action.option_strings for _, parser in parsers(command) for action in parser._actions
    )
    for words in command_lines(command):
        if takes_out and not any(word.startswith("--out") for word in words):
            words += ["--out", "out"]
        with contextlib.suppress(Begun):
            done = call_mpdemo(*words)
            said = done.stderr
            assert done.returncode in (0, 1, 2) and "Traceback" not in said, done
            if done.returncode == 2:
                assert said.startswith("mpdemo: error: ") and said.count("\n") == 1 and len(said) < 1500, (
                    done
                )
    assert {path.name for path in tmp_path.iterdir()} == {"here"}
    assert {path.name for path in folder.iterdir()} <= {"log", "out", "slurm", "runs", *VALUES}
