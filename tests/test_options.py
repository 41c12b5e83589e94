"""Command-line options made from a dataclass: one option per field, and mistakes in one line."""

import argparse
from typing import Literal

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from mpdemo.errors import UserError, one_line_errors
from mpdemo.options import add_options, option_name, options_from


@one_line_errors(option_name)
@dataclass(frozen=True, config={"extra": "forbid"})
class Example:
    """A field of every kind."""

    batch_size: int = Field(128, ge=1, description="images per step, 100 % of them")
    schedule: Literal["gpipe", "1f1b"] | None = Field(None, description="order of the operations")
    lr: float = Field(0.01, gt=0, description="learning rate")
    timeline: bool = Field(False, description="record it")


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    add_options(parser, Example)
    return parser


def test_text_becomes_the_fields_type_and_what_is_not_given_keeps_its_default(parser):
    args = parser.parse_args(["train", "--batch-size", "32", "--schedule", "1f1b", "--timeline"])
    assert options_from(args, Example) == Example(batch_size=32, schedule="1f1b", timeline=True)
    assert options_from(parser.parse_args(["train"]), Example) == Example()


def test_the_help_shows_description_default_and_choices(parser):
    text = " ".join(parser.format_help().split())
    assert "--batch-size BATCH_SIZE images per step, 100 % of them (default 128)" in text
    assert "--schedule {gpipe,1f1b} order of the operations" in text and "(default None)" not in text
    assert "--timeline record it" in text


@pytest.mark.parametrize(
    "option, message",
    [
        ("--batch-size 0", "--batch-size 0 is not allowed; allowed: 1 or more"),
        ("--batch-size many", "--batch-size 'many' is not allowed; allowed: a whole number"),
        ("--schedule 1f1", "--schedule '1f1' is not allowed; allowed: gpipe, 1f1b; did you mean '1f1b'?"),
        ("--lr 0", "--lr 0 is not allowed; allowed: more than 0"),
    ],
)
def test_a_wrong_value_is_one_line_which_names_the_option(parser, option, message):
    args = parser.parse_args(["train", *option.split()])
    with pytest.raises(UserError) as refusal:
        options_from(args, Example)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_a_misspelt_name_gets_the_nearest_one():
    with pytest.raises(UserError, match="unknown name 'batch_sizes'; allowed: .*did you mean 'batch_size'"):
        Example(batch_sizes=3)
