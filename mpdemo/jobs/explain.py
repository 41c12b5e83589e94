"""Find the known failures in a log, and say what each one is and what to do: ``python -m mpdemo explain LOGFILE``.

The failures are data, in known_failures.toml; how a log is read stands in reading.py. Taught in
notebooks/10_when_it_breaks.ipynb.
"""

import functools
import os
import re
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs.reading import Log

# In this order: a rank that waited in vain, or lost another one, is seldom the one to blame.
KINDS = ("cause", "waiting", "hint", "vague", "ended", "unknown", "consequence")
MOST_BYTES = 64 * 2**20  # of a file that are read: of a larger one, its end
LONGEST = 240  # characters of a line that are shown
ALSO = 4  # further findings that are shown, in one line each
MESSAGE = 12  # lines that the message of an exception may take
DOWNLOAD, NAN = " (in a download)", "loss is nan"  # words of the table for what a line alone does not say


@dataclass(frozen=True)
class Known:
    """A known failure."""

    seen: tuple  # messages of which one is in the log (how: see the table); empty: what stands for an unknown line
    what: str
    do: str
    notebook: str = ""  # where it is explained
    kind: str = "cause"  # one of `KINDS`
    by: str = ""  # "slurm": its commands say this where they refuse

    @functools.cached_property
    def pattern(self):
        """The compiled expression that finds the message."""
        return re.compile("|".join(map(_expression, self.seen)))

    def told(self, text, line) -> str:
        """Say what it is or what to do, with the text that the message's last ``...`` stood for in a line."""
        match = self.pattern.search(line)
        shown = [part for part in match.groups() if part is not None] if match else []
        return text.replace("{}", shown[-1]) if shown else text

    def what_of(self, line) -> str:
        """Say what it is, of a line that shows it."""
        return self.told(self.what, line)


def _expression(words) -> str:
    """Return the expression of a message: whole words, and the first letter in both cases if it is a small one."""
    text = words.removeprefix("^").removesuffix("$")
    first, *others = map(re.escape, text.split("..."))
    if first[:1].islower():
        first = f"[{first[0]}{first[0].upper()}]{first[1:]}"
    found = "(.{0,300}?)".join([first, *others]) if first or words[0] == "^" else "(.{0,300}?)".join(others)
    if others and not others[-1]:
        found = found.removesuffix("?)") + ")"  # all that is left of the line
    begins = "^" if words[0] == "^" else r"(?<!\w)" if text[0].isalnum() else ""
    return begins + found + ("$" if words[-1] == "$" else r"(?!\w)" if text[-1].isalnum() else "")


UNKNOWN = {  # by what a line looks like that no row of the table fits: see `Log.messages`
    "exception": Known((), "an error in the program", "look at this place; print the values that it uses before"),
    "nccl": Known((), "NCCL's own reason", "search for these words and NCCL; NCCL_DEBUG=INFO says more", kind="hint"),
    "error": Known(
        (), "a line that looks like an error", "search for its words; read the lines around it", kind="unknown"
    ),
}


@functools.cache
def known_failures() -> tuple:
    """Return every `Known` failure of the table."""
    rows = tomllib.loads(Path(__file__).with_name("known_failures.toml").read_text(encoding="utf-8"))["failure"]
    return tuple(Known(**row | {"seen": tuple(row["seen"])}) for row in rows)


@functools.cache
def _pieces() -> list:
    """Return the longest piece of each message and the number of its row: a search for them is much faster."""
    messages = [(words.strip("^$"), number) for number, known in enumerate(known_failures()) for words in known.seen]
    parts = [(words[words[0].islower() :].split("..."), number) for words, number in messages]
    return [(max(pieces, key=len), number) for pieces, number in parts]


def _rows(lines) -> list:
    """Return the numbers of the rows that each line may fit: one search for each piece, through all lines."""
    text, starts, rows = "\n".join(lines), [0, *accumulate(len(line) + 1 for line in lines)], [set() for _ in lines]
    for piece, number in _pieces():
        at = text.find(piece)
        while at >= 0:
            line = bisect_right(starts, at) - 1
            rows[line].add(number)
            at = text.find(piece, starts[line + 1])
    return rows


def _first(line, rows, by="") -> Known | None:
    """Return the first of some rows that fits a line."""
    rows = (known_failures()[number] for number in sorted(rows))
    return next((known for known in rows if by in known.by and known.pattern.search(line)), None)


def known_in(line, by="") -> Known | None:
    """Return the first row of the table whose message is in a line: of all rows, or of those that one program says."""
    return _first(line, _rows([line])[0], by)


@dataclass(frozen=True)
class Finding:
    """A failure in a log: the first line that shows it (its number, its text), and how many lines do."""

    known: Known
    number: int
    line: str
    count: int = 1
    place: str = ""  # the user's own file and line, where a traceback names them

    @property
    def words(self) -> str:
        """The part of the line that is known; the rest differs from run to run."""
        match = self.known.pattern.search(self.line)
        return match[0] if match else ""  # it must begin the line, behind a launcher's label

    @property
    def message(self) -> str:
        """The line from the exception's name on, without a launcher's label before it."""
        return re.sub(r"^.*?(?=\b\w+(?:Error|Exception): )", "", self.line)

    @property
    def paragraph(self) -> str:
        """The line, what it is and what to do."""
        known, more = self.known, f" (and {self.count - 1} more)" * (self.count > 1)
        lines = [_shown(self.number, self.line, self.line.find(self.words)) + more]
        lines += [f"  where: {self.place.replace(f'{paths.root()}/', '')}"] * bool(self.place)
        lines += [
            f"  what it is: {known.what_of(self.line)}",
            f"  what to do: {known.told(known.do, self.line)}",
        ]
        return "\n".join(lines + [f"  read: notebooks/{known.notebook}.ipynb"] * bool(known.notebook))


def find(text: str | Log) -> list:
    """Return the `Finding` of each failure in `text`, a log of one or many processes, the first real cause first.

    A run that ended well has none: what went wrong before it resumed or went on is no failure.
    """
    log = text if isinstance(text, Log) else Log(text)
    seen = log.since_restart(list(_seen(log)))
    rest = [(number, known, says) for number, known, says in seen if says != "exception" or not log.survived(number)]
    for shown in (rest, seen):
        if log.ended_well([(number, known.kind == "consequence", says) for number, known, says in shown]):
            return []
        if any(known.kind == "cause" for _, known, _ in shown):
            seen = shown
            break
    causes = [number for number, known, _ in seen if known.kind == "cause" and known.seen]
    findings = {}
    for number, known, _ in seen:
        if not known.seen and any(number < other <= number + MESSAGE for other in causes):
            continue  # the cause is in the exception's own message
        key = known if known.seen else (known, number)
        first = findings.get(key) or Finding(known, number + 1, log.line(number), 0, log.places.get(number, ""))
        findings[key] = replace(first, count=first.count + log.counts[log.keys[number]])
    return sorted(findings.values(), key=lambda finding: (KINDS.index(finding.known.kind), finding.number))


def _seen(log):
    """Yield number and `Known` of each line that may be a failure, and what it looks like."""
    messages = list(log.messages())
    texts = [line + DOWNLOAD * (number in log.web) for number, line, _ in messages]
    for (number, _, says), text, rows in zip(messages, texts, _rows(texts), strict=True):
        known = _first(text, rows) or (known_in(NAN) if says == "nan" else UNKNOWN.get(says.replace("fault", "error")))
        if known and not (says in ("soft", "nccl", "error", "nan", "noise") and log.went_on(number, says)):
            follows = says == "noise" or number in log.chained
            yield number, replace(known, kind="consequence") if follows else known, says


def report(text: str) -> str:
    """Return what a log, `text`, shows: the first cause and what to do, then the rest; or that the run ended well."""
    log = Log(text)
    if findings := find(log):
        return in_words(findings)
    number, line = log.end
    if not line:
        return "This log is empty: the program wrote nothing, or writes to another file."
    well = "This run ended well" if log.done else "No failure is in this log: the run ended well, or it still runs"
    return f"{well}. Its last line:\n{_shown(number + 1, line)}"


def in_words(findings) -> str:
    """Return findings in words: the first cause and what to do, then the rest."""
    first, *others = findings
    head = "No cause is in this log, only what follows from one:\n" if first.known.kind == "consequence" else ""
    also = [_shown(other.number, other.line) for other in others[:ALSO]]
    return head + first.paragraph + ("\n\nAlso in this log:\n" + "\n".join(also) if also else "")


def _shown(number, line, place=0) -> str:
    """A line as it is printed: of a long one the part around a place."""
    start = place - 40 if place > LONGEST // 2 and len(line) > LONGEST else 0
    part = line[start : start + LONGEST - 8]
    return f"line {number}: {'... ' * (start > 0)}{line if len(line) <= LONGEST else part + ' ...'}"


def add_arguments(parser):
    """Declare the command's options."""
    parser.add_argument("logfile", metavar="LOGFILE", help="the log of a failed job: runs/NAME/log.txt, slurm-7.out")


def main(args) -> int:
    """Print what the log shows, or the end of a very large one; return 0."""
    if not os.path.isfile(args.logfile):  # a pipe would wait forever
        raise UserError(f"{args.logfile} is no file; give a job's log file")
    with open(args.logfile, "rb") as file:
        if b"\0" in file.read(8192):
            raise UserError(f"{args.logfile} is not text; give a job's log file")
        begin = file.seek(max(0, os.path.getsize(args.logfile) - MOST_BYTES))
        if begin:
            print(f"Only its last {MOST_BYTES // 2**20} MiB are read; lines are counted from there.\n")
        print(report(file.read(MOST_BYTES)))
    return 0
