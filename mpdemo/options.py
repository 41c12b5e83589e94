"""Command-line options made from the fields of a pydantic dataclass: one declaration for shell and notebooks.

Every field becomes ``--field-name``; its description becomes the help. The text from the shell goes to the dataclass
unchanged, which converts it and refuses what is not allowed.
"""

import argparse
from typing import Literal, get_args, get_origin

from mpdemo.errors import UserError, did_you_mean, one_line


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, without the usage lines above it."""

    def error(self, message):
        """Say what was wrong and where the options are listed; ends with exit status 2."""
        self.exit(2, f"mpdemo: error: {one_line(message)}; see {self.prog} --help\n")

    def parse_args(self, args=None, namespace=None):
        """Parse; name the option that is closest to an unknown one."""
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [text for action in self._actions for text in action.option_strings]
            self.error(
                f"unknown argument {unknown[0]!r}{did_you_mean(unknown[0].partition('=')[0], known)}"
            )
        return given


class LineParser(Parser):
    """A parser that raises its mistakes: for a cell, and for a process of many."""

    def error(self, message):
        """Raise what was wrong."""
        raise UserError(f"{self.prog}: {one_line(message)}")


def add_options(parser, dataclass, without=()):
    """Add one option per field to an argparse parser; a bool field becomes a switch."""
    for name, field in dataclass.__pydantic_fields__.items():
        if name in without:
            continue
        arguments = {"default": argparse.SUPPRESS, "help": (field.description or "").replace("%", "%%")}
        if field.annotation is bool:
            parser.add_argument(option_name(name), action="store_true", **arguments)
            continue
        if not field.is_required() and field.default is not None:
            arguments["help"] += f" (default {field.default})"
        choices = _choices(field.annotation)
        parser.add_argument(
            option_name(name), metavar="{" + ",".join(choices) + "}" if choices else None, **arguments
        )


def options_from(args, dataclass, **more):
    """Return the dataclass with the options that were given, and `more`; `args` may hold others, left alone."""
    given = {name: getattr(args, name) for name in dataclass.__pydantic_fields__ if hasattr(args, name)}
    return dataclass(**given | more)


def option_name(field):
    """Return the command-line option of a field: ``batch_size`` is ``--batch-size``."""
    return "--" + field.replace("_", "-")


def _choices(annotation):
    """Return the texts that an annotation allows: of a Literal, or of a Literal that may be None."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return list(map(str, parts))
    return [choice for part in parts for choice in _choices(part)]


def count(low, high):
    """Return a converter for argparse that takes whole numbers from `low` to `high`."""

    def convert(text):
        if text.isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")

    return convert
