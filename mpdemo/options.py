"""Command-line options made from the fields of a pydantic dataclass: one declaration for shell and notebooks.

Every field becomes ``--field-name``; its description becomes the help. The text from the shell goes to the dataclass
unchanged, which converts it and refuses what is not allowed.
"""

import argparse
from typing import Literal, get_args, get_origin

from mpdemo.errors import one_line


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, without the usage lines above it."""

    def error(self, message):
        """Say what was wrong and where the options are listed; ends with exit status 2."""
        self.exit(2, f"mpdemo: error: {one_line(message)}; see {self.prog} --help\n")

    def option_strings(self) -> list[str]:
        """Return all options, as they are written."""
        return [text for action in self._actions for text in action.option_strings]


def add_options(parser, dataclass):
    """Add one option per field to an argparse parser; a bool field becomes a switch."""
    for name, field in dataclass.__pydantic_fields__.items():
        arguments = {"default": argparse.SUPPRESS, "help": (field.description or "").replace("%", "%%")}
        if field.annotation is bool:
            parser.add_argument(option_name(name), action="store_true", **arguments)
            continue
        if not field.is_required() and field.default is not None:
            arguments["help"] += f" (default {field.default})"
        choices = _choices(field.annotation)
        parser.add_argument(option_name(name), metavar="{" + ",".join(choices) + "}" if choices else None, **arguments)


def options_from(args, dataclass):
    """Return the dataclass with the options that were given; `args` may hold others, which are left alone."""
    given = {name: getattr(args, name) for name in dataclass.__pydantic_fields__ if hasattr(args, name)}
    return dataclass(**given)


def option_name(field):
    """Return the command-line option of a field: ``batch_size`` is ``--batch-size``."""
    return "--" + field.replace("_", "-")


def as_arguments(values) -> list[str]:
    """Return values by setting as command-line arguments; None and False are left out, True is an option alone."""
    arguments = []
    for name, value in values.items():
        text = str(value)
        if value is True:
            arguments.append(option_name(name))
        elif value is not None and value is not False:
            arguments += [f"{option_name(name)}={text}"] if text.startswith("-") else [option_name(name), text]
    return arguments


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
