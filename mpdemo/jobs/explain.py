"""Find the known failures in a log, and say what each one is and what to do: ``python -m mpdemo explain LOGFILE``.

The failures are data, in known_failures.toml. Taught in notebooks/10_when_it_breaks.ipynb.
"""

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.world.launch import lost_a_peer

# In this order: a rank that waited in vain, or lost another one, is seldom the one to blame.
KINDS = ("cause", "waiting", "consequence", "silent")
MOST_BYTES = 32 * 2**20  # of a file that are read: of a larger one, its end
LONGEST = 240  # characters of a line that are shown
ERROR = re.compile(
    r"\b\w*(?:Error|Exception|Interrupt)\b:|\b(?:error|fatal|failed|killed|aborted|segmentation fault)\b", re.I
)
TRACEBACK_FILE = re.compile(r'^\W*(?:\[?[\w:]+\]?:? +)?File ".*", line \d+')  # the next line is code, no message
UNSEEN = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\x20-\x7e\xa0-\U0010ffff]")  # colours and control characters


@dataclass(frozen=True)
class Known:
    """A known failure."""

    seen: tuple  # messages of which one is in the log, ``...`` for any text; for a silent failure: what one sees
    what: str  # ``...`` stands for the text that the message's last ``...`` stood for
    do: str
    notebook: str = "00_start_here"  # where it is explained
    kind: str = "cause"  # one of `KINDS`
    by: str = ""  # who says it: "slurm" in refusing a job, "launcher" in starting one; else the processes themselves

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


def find(text) -> list:
    """Return the `Finding` of each known failure in a log of one or many processes, the first real cause first."""
    findings = {}
    lost = next(known for known in known_failures() if known.kind == "consequence")  # the first one there
    present = [known for known in known_failures() if known.kind != "silent" and known.may_be_in(text)]
    for number, line in messages(text):
        known = next((known for known in present if known.pattern.search(line)), lost if lost_a_peer(line) else None)
        if known:
            first = findings.get(known)
            seen = (first.number, first.line, first.count + 1) if first else (number, line)
            findings[known] = Finding(known, *seen)
    return sorted(findings.values(), key=lambda finding: KINDS.index(finding.known.kind))


def messages(text):
    """Yield the number and the text of each line that may be a message: no line of code in a traceback."""
    after_file = False
    for number, line in enumerate(text.split("\n"), 1):
        line = UNSEEN.sub("", line.rstrip("\r").rpartition("\r")[2]).strip()  # of a progress bar, its last state
        if line and not after_file:
            yield number, line
        after_file = bool(TRACEBACK_FILE.match(line))


def last_error(text, findings=()):
    """Return number and text of the last line that looks like an error and is none of the known ones, or None.

    Where only consequences are known, an exception that Python reports counts more than any other line.
    """
    known = {finding.known for finding in findings}
    lines = [(number, line) for number, line in messages(text) if ERROR.search(line) and not lost_a_peer(line)]
    lines = [row for row in lines if not any(one.pattern.search(row[1]) for one in known)]
    exceptions = [row for row in lines if re.search(r"(?:^|[\]:] )[\w.]*(?:Error|Exception): ", row[1])]
    return (exceptions or lines or [None])[-1]


def report(text) -> str:
    """Return what a log shows, in words: the known failures, or the last line that looks like an error."""
    findings = find(text)
    paragraphs = [_paragraph(finding) for finding in findings]
    if not any(finding.known.kind == "cause" for finding in findings):
        other = last_error(text, findings)
        where = (
            f"The last line that looks like an error:\n{_shown(*other)}" if other else "No line looks like an error."
        )
        also = "What follows from it:" if findings and other else ""
        paragraphs = [f"No known cause in this log. {where}", *filter(None, [also]), *paragraphs]
    return "\n\n".join(paragraphs)


def _paragraph(finding) -> str:
    known, more = finding.known, finding.count - 1
    lines = [_shown(finding.number, finding.line) + (f" (and {more} more)" if more else "")]
    what = known.what_of(known.pattern.search(finding.line)) if "..." in known.what else known.what
    return "\n".join(
        [*lines, f"  what it is: {what}", f"  what to do: {known.do}", f"  read: notebooks/{known.notebook}.ipynb"]
    )


def _shown(number, line) -> str:
    return f"line {number}: {line if len(line) <= LONGEST else line[: LONGEST - 3] + '...'}"


def read(path) -> str:
    """Return the text of a log, of a very large one its end; refuse what is missing, no plain file or not text."""
    path = Path(path)
    try:
        if not path.is_file():  # a folder, or a pipe that would wait for ever
            raise UserError(f"{path} is {'no plain file' if path.exists() else 'not there'}; give a job's log file")
        with path.open("rb") as file:
            beginning = file.read(8192)
            file.seek(max(0, path.stat().st_size - MOST_BYTES))
            content = file.read(MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    if b"\0" in beginning:
        raise UserError(f"{path} is not text; give a job's log file")
    return content.decode("utf-8", errors="replace")


def add_arguments(parser):
    """Declare the command's options."""
    parser.add_argument("logfile", metavar="LOGFILE", help="the log of a failed job: runs/NAME/log.txt, slurm-7.out")


def main(args) -> int:
    """Print what the log shows; return 0."""
    text = read(args.logfile)
    if Path(args.logfile).stat().st_size > MOST_BYTES:
        print(f"Only its last {MOST_BYTES // 2**20} MiB are read; lines are counted from there.\n")
    print(report(text))
    return 0
