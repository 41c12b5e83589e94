"""The known failures as data: those of known_failures.toml, and Slurm's refusals in slurm_answers.py."""

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mpdemo.jobs.slurm_answers import CAUSES

# In this order: a rank that waited in vain, or lost another one, is seldom the one to blame.
KINDS = ("cause", "waiting", "consequence", "silent")


@dataclass(frozen=True)
class Known:
    """A known failure.

    Attributes
    ----------
    seen : tuple of str
        The messages of which one is in the log; ``...`` stands for any text. For a silent failure: what one sees.
    what, do : str
        What it is, and what to do.
    notebook : str
        Where it is explained.
    kind : str
        One of `KINDS`.
    """

    seen: tuple
    what: str
    do: str
    notebook: str
    kind: str = "cause"

    @functools.cached_property
    def pattern(self):
        """The compiled expression that finds the message."""
        return re.compile("|".join(re.escape(words).replace(r"\.\.\.", ".{0,300}?") for words in self.seen))

    def may_be_in(self, text) -> bool:
        """Whether the longest piece of a message is in a text: much faster than the pattern."""
        return any(max(words.split("..."), key=len) in text for words in self.seen)


@dataclass(frozen=True)
class Finding:
    """A known failure in a log: the first line that shows it (its number, its text), and how many lines do."""

    known: Known
    number: int
    line: str
    count: int = 1

    @property
    def words(self) -> str:
        """The part of the line that is known; the rest differs from run to run."""
        return self.known.pattern.search(self.line)[0]

    @property
    def message(self) -> str:
        """The line from the exception's name on, without a launcher's label before it."""
        return re.sub(r"^.*?(?=\b\w+(?:Error|Exception): )", "", self.line)


@functools.cache
def known_failures() -> tuple:
    """Return every `Known` failure: those of known_failures.toml, then Slurm's refusals."""
    rows = tomllib.loads(Path(__file__).with_name("known_failures.toml").read_text(encoding="utf-8"))["failure"]
    known = [Known(**row | {"seen": tuple(row["seen"])}) for row in rows]
    return (*known, *(Known((words,), *_in_two(cause), "00_start_here") for words, cause in CAUSES.items()))


def _in_two(cause) -> list:
    """Part a cause of `slurm_answers` into what it is and what to do."""
    what, *do = re.split(r"; (?=see)|: ", cause, maxsplit=1)
    return [what, do[0] if do else "change what the job file asks for, and submit again"]
