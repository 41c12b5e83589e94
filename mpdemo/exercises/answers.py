"""What several checks ask of an answer: is a number close, which letters are in it, which training does it start."""

import argparse
import math
import re
import shlex

from mpdemo.errors import UserError
from mpdemo.exercises.check import Wrong, require
from mpdemo.options import add_options, options_from
from mpdemo.settings import Settings

COMMAND = re.compile(r"\bmpdemo\s+train\b")


def close(answer, value, tolerance=0.01):
    """Whether a number is right, within 1 % by default."""
    return math.isclose(answer, value, rel_tol=tolerance)


def refuse_mistakes(answer, mistakes, tolerance=0.01):
    """Raise `Wrong` with the message of the value, in a dictionary, that an answer is close to."""
    for value, message in mistakes.items():
        if close(answer, value, tolerance):
            raise Wrong(message)


def letters_of(answer, allowed) -> set:
    """Return the letters of an answer; raise `Wrong` where another one than the allowed is in it.

    "ad", "a, d" and ["a", "d"] are the same answer.
    """
    letters = set("".join(answer).lower()) - set(" ,;")
    require(letters <= set(allowed), f"{answer!r} holds a letter other than {', '.join(allowed)}.")
    return letters


class Options(argparse.ArgumentParser):
    """A parser that refuses an answer where the command would end with an error."""

    def error(self, message):
        raise Wrong(f"The command is refused: {message}.")


def training_of(text) -> tuple[list, Settings]:
    """Return how a command or a job file starts its training: the words before ``train``, and the settings after it.

    Raises
    ------
    Wrong
        It starts none, or the training would refuse its options.
    """
    lines = text.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if COMMAND.search(line)]
    words = next((words for words in commands if "train" in words), [])
    require(words, "There is no `-m mpdemo train` in it.")
    place = words.index("train")
    parser = Options(add_help=False)
    add_options(parser, Settings)
    try:
        parsed, unknown = parser.parse_known_args(words[place + 1 :])
        require(not unknown, f"The training knows no {' '.join(unknown)}.")
        return words[:place], options_from(parsed, Settings)
    except UserError as error:
        raise Wrong(f"The command is refused: {error}.") from None
