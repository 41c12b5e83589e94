"""The command line as people expect it: an overview, near misses named, every command with an example."""

from functools import partial

import pytest

from mpdemo.__main__ import COMMANDS, GROUPS
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
