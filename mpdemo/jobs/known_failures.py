"""The known failures as data: the table of known_failures.toml."""

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

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
        What it is, and what to do; ``...`` stands for the message's own text there.
    notebook : str
        Where it is explained.
    kind : str
        One of `KINDS`.
    by : str
        Who says it: "slurm" in refusing a job, "launcher" in starting one; empty for the processes themselves.
    """

    seen: tuple
    what: str
    do: str
    notebook: str = "00_start_here"
    kind: str = "cause"
    by: str = ""

    @functools.cached_property
    def pattern(self):
        """The compiled expression that finds the message."""
        return re.compile("|".join(re.escape(words).replace(r"\.\.\.", "(.{0,300})") for words in self.seen))

    def may_be_in(self, text) -> bool:
        """Whether the longest piece of a message is in a text: much faster than the pattern."""
        return any(max(words.split("..."), key=len) in text for words in self.seen)

    def what_of(self, match) -> str:
        """Say what it is, with the text that the message's last ``...`` stood for."""
        shown = [text for text in match.groups() if text is not None]
        return self.what.replace("...", repr(shown[-1])) if shown else self.what


@functools.cache
def known_failures() -> tuple:
    """Return every `Known` failure of the table."""
    rows = tomllib.loads(Path(__file__).with_name("known_failures.toml").read_text(encoding="utf-8"))["failure"]
    return tuple(Known(**row | {"seen": tuple(row["seen"])}) for row in rows)


def said_by(speaker) -> list:
    """Return the known failures that "slurm" or a "launcher" says."""
    return [known for known in known_failures() if known.by == speaker]
