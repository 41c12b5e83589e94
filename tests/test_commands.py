"""The command line as people expect it: an overview, near misses named, every command with an example."""

import pytest

from mpdemo import terminal
from mpdemo.__main__ import COMMANDS, GROUPS, main
from mpdemo.plan import strategies


def said(capsys, *words) -> tuple:
    """Run a command here; return its exit status and all that it printed."""
    try:
        status = main(list(words))
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_alone_it_shows_every_command_in_its_group(capsys):
    status, text = said(capsys)
    assert status == 0 and said(capsys, "--help") == (0, text)
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    assert all(f"\n  {name}" in text for name in COMMANDS) and all(f"\n{group}:\n" in text for group in GROUPS)
    assert said(capsys, "--version")[1].startswith("mpdemo ")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("pla", "'plan'"),
        ("--verison", "'--version'"),
        ("plan --devcies 2", "'--devices'"),
        ("env --stie x", "'--site'"),
    ],
)
def test_a_near_miss_is_named(capsys, words, near):
    status, text = said(capsys, *words.split())
    assert status == 2 and f"did you mean {near}?" in text and text.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_a_sentence_an_example_and_the_exit_statuses(capsys, name):
    status, text = said(capsys, name, "--help")
    assert status == 0 and COMMANDS[name][1][1:] in " ".join(text.split())
    assert f" {name} {COMMANDS[name][2]}".rstrip() in text and "exit status:" in text


def test_colours_and_short_lines_are_for_a_terminal_alone(monkeypatch):
    text, rows = "  a verdict:\n    " + "word " * 30, [["->", "ddp", "yes", "1,000", "2,000", "3.0", "4.0", "1.90"]]
    assert terminal.coloured("same", "green") == "same" and terminal.wrapped(text) == text
    assert strategies._as_wide_as_the_terminal(rows).endswith("1.90")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert terminal.coloured("same", "green") == "\x1b[32msame\x1b[0m"
    assert max(map(len, terminal.wrapped(text).splitlines())) <= 60
    assert terminal.wrapped(text).splitlines()[2].startswith("      word")
    *table, more = strategies._as_wide_as_the_terminal(rows).splitlines()
    assert max(map(len, table)) <= 60 and more.endswith("has: communication (ms), step time (ms), speed-up")
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.coloured("same", "green") == "same"
