"""What a command prints on a terminal: colours, and no line that is wider. A pipe or a file gets the plain text."""

import os
import shutil
import sys
import textwrap

COLOURS = {"green": 32, "yellow": 33, "red": 31}


def width() -> int | None:
    """Return how many characters a line of the terminal has; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured(text: str, name: str) -> str:
    """Return a text in a colour, unless its reader does not want any (https://no-color.org)."""
    if width() is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{COLOURS[name]}m{text}\x1b[0m"


def wrapped(text: str) -> str:
    """Return a text whose long lines continue in the next one, indented by two more."""
    if (columns := width()) is None:
        return text
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        options = {"subsequent_indent": indent + "  ", "break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(line, columns, **options) or [""]
    return "\n".join(lines)


class Progress:
    """A line on a terminal that says what a command is doing, and is gone at the end; nothing in a pipe or a file."""

    def __enter__(self):
        self.stream = sys.stderr  # which a reader's code cannot replace meanwhile
        self.is_seen = self.stream.isatty()
        return self

    def __call__(self, text):
        """Show a text in place of the one before."""
        if self.is_seen:
            print(f"\r\x1b[K{text}", end="", file=self.stream, flush=True)

    def __exit__(self, *error):
        self("")
