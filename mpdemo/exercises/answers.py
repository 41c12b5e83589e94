"""What several checks ask of an answer: is a number close, is it a known mistake, which letters does it hold."""

import math

from mpdemo.exercises.check import Wrong, require


def close(answer, value, tolerance=0.01):
    """Whether a number is right, within 1 % by default."""
    return math.isclose(answer, value, rel_tol=tolerance)


def refuse_mistakes(answer, mistakes, tolerance=0.01):
    """Raise `Wrong` with the message of the value, in a dictionary, that an answer is close to."""
    for value, message in mistakes.items():
        if close(answer, value, tolerance):
            raise Wrong(message)


def letters_of(answer, allowed) -> set:
    """Return the letters of an answer; raise `Wrong` where it holds another one than the allowed."""
    letters = set(str(answer).lower())
    require(letters <= set(allowed), f"{answer!r} holds a letter other than {', '.join(allowed)}.")
    return letters
