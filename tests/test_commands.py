"""The command line as people expect it: an overview, near misses named, every command with an example."""

import pytest

from mpdemo.__main__ import COMMANDS, GROUPS, main


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
