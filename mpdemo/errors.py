"""The exceptions that are shown as one line, without a traceback: a user's mistake, and a run that cannot continue."""

import difflib
import functools
import os
import re
import reprlib
import textwrap

COLUMNS = 95  # that JupyterLab shows in a line; it breaks a longer one within a word


class Quoted(reprlib.Repr):
    """A short text of a user's value, which may be a whole file."""

    def repr_int(self, value, level):
        """Return a number, in hexadecimal where Python refuses to write its thousands of digits."""
        return super().repr_int(value, level) if value.bit_length() < 10_000 else f"{hex(value)[:40]}..."


QUOTED = Quoted()
QUOTED.maxstring = QUOTED.maxother = QUOTED.maxlong = 80
# Colours, control characters, and marks that turn the direction of the text: a terminal would obey them.
UNSEEN = re.compile(
    r"\x1b\[[0-9;]*[A-Za-z]|[^\t\n\x20-\x7e\xa0-\U0010ffff]|[\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class UserError(Exception):
    """Bad input. The message says what was wrong, the value, what is allowed and what to do.

    `mpdemo` prints it after ``mpdemo: error:`` and ends with exit status 2. In a notebook the
    traceback is folded to that one line.
    """

    status = 2

    def _render_traceback_(self):
        """IPython calls this instead of drawing a traceback."""
        return [wrapped(printable(f"{type(self).__name__}: {self}"))]


class RunFailed(UserError):
    """The input was allowed, and the run cannot continue: one line as well, exit status 1."""

    status = 1


def printable(text) -> str:
    """Return a text that somebody else wrote without what a terminal would obey."""
    return UNSEEN.sub("", text)


def text_of(value, what) -> str:
    """Return a text or a path that a user gave, as text; `UserError` for anything else: `what` it should be."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{what} is a text; not {QUOTED.repr(value)}")
    return os.fspath(value)


def one_line(text) -> str:
    """Return a message as one printable line: what a user typed may hold lines, be long, or be no text at all."""
    text = printable(" ".join(text.split())).encode(errors="backslashreplace").decode()
    return text if len(text) <= 700 else f"{text[:400]} ... {text[-250:]}"


def wrapped(text, prefix="") -> str:
    """Return a message for a notebook's page: its lines broken between words, each of them after the prefix."""
    wrap = textwrap.TextWrapper(
        COLUMNS, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False
    )
    wrap.break_long_words = False  # a path stays whole, to be copied
    return "\n".join(wrap.fill(line) or prefix for line in text.split("\n"))


def error_line(error) -> str:
    """Return an exception as one line: its class, and the first line of its message where it has one."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")


def did_you_mean(word, known) -> str:
    """Return ``; did you mean 'batch_size'?`` for a word close to a known one, else an empty text."""
    near = difflib.get_close_matches(str(word).lower(), list(map(str, known)), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def from_validation(error, fields, label) -> UserError:
    """Return pydantic's first complaint as one line: what was wrong, the value, what is allowed."""
    complaint = error.errors(include_url=False)[0]
    kind, value, limits = complaint["type"], complaint["input"], complaint.get("ctx", {})
    name = complaint["loc"][0] if complaint["loc"] else ""
    name = fields[name] if isinstance(name, int) else name  # of a value that was given by its place
    if kind == "unexpected_keyword_argument":
        return UserError(f"unknown name {name!r}; allowed: {', '.join(fields)}{did_you_mean(name, fields)}")
    if kind == "missing":
        return UserError(f"{label(name)} is missing; give one")
    if "error" in limits:  # raised by a check of our own
        return UserError(f"{label(name)} {QUOTED.repr(value)}: {limits['error']}")
    shown = re.sub(r"^'([\w.+-]+)'$", r"\1", QUOTED.repr(value))  # one word needs no quotes
    if kind == "literal_error":
        choices = [word.strip("'") for word in limits["expected"].replace(" or ", ", ").split(", ")]
        allowed = f"{', '.join(choices)}{did_you_mean(value, choices)}"
        return UserError(f"{label(name)} {shown} is not allowed; allowed: {allowed}")
    why = complaint["msg"].replace("Input", "it", 1)
    why = re.sub("tuple", "list", why, flags=re.IGNORECASE)  # as TOML calls it
    return UserError(f"{label(name)} {shown} is not allowed: {why}")


def one_line_errors(label=str):
    """Return a decorator for a pydantic dataclass: its complaints become a `UserError` of one line.

    `label` says how a field is called where the user wrote it, as for `from_validation`.
    """

    def decorate(cls):
        construct = cls.__init__

        @functools.wraps(construct)
        def construct_or_explain(self, *args, **values):
            try:
                construct(self, *args, **values)
            except ValueError as error:
                if not hasattr(error, "errors"):
                    raise
                raise from_validation(error, list(cls.__dataclass_fields__), label) from None

        cls.__init__ = construct_or_explain
        return cls

    return decorate
