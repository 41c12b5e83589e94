"""Read a log in one pass: what its lines say, which exceptions end its tracebacks, and how far the run came.

Lines that differ in digits alone say the same, so nearly all lines of a long log cost a look into a dictionary. Of a
log in which each line differs, those with an alarming word are looked at, its beginning and its end.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

from mpdemo.tools.explain import looks
from mpdemo.tools.explain.known import Known, known_in
from mpdemo.tools.explain.looks import (
    CHAIN,
    DIRECT,
    FILE,
    HEADLESS,
    IGNORED,
    LIBRARY,
    RAISED,
    THREAD,
    TRACEBACK,
    WARNS,
)

KINDS_OF_LINES = 3000  # that are looked at; from then on alarming ones, and as many lines at the end
BEGIN = 500  # lines by which a label is recognised
BARS = 20  # of progress, before and after an exception, that are compared
BLOCK = 20  # lines of a traceback by which its label is recognised
HITS = 600  # lines with an alarming word at the beginning, and as many at the end, that are looked at
AGAIN = 50  # lines of one kind that are looked at: a digit may decide, as in "exitcode: -9"
# lines of a traceback, with those of other ranks in between; further lines of a message
OPEN, MESSAGE = 400, 12
LAST = 200  # lines at the end in which the run may say that it is done
ALARMS = b"Traceback rror xception ailed illed emory esum annot WARN CANCELLED Xid Evicted Abort fault exit".split()
DIGITS = b"0123456789"
UTF16 = b"\xff\xfe", b"\xfe\xff"  # its marks


@dataclass(eq=False)
class Trace:
    """A traceback that is being read: the user's own place in it, and its innermost places."""

    begin: int
    earlier: "Seen | None" = None  # the exception while which this one came up
    ignored: bool = False  # by Python, which says so above it
    thread: bool = False  # of a thread beside the program
    direct: bool = False  # whether it was raised from the earlier one
    place: str = ""
    own: bool = False  # whether a frame is the reader's
    indent: int = 1  # of its frames
    code: str = ""  # the line that raised
    inner: list = field(default_factory=list)
    within: str = ""  # see `looks.WITHIN`

    def frame(self, match):
        """Note a frame, the match of `FILE`."""
        file = match[1].replace("\\", "/")
        own, self.code = not LIBRARY.search(file), ""
        self.inner = [*self.inner[-2:], f"{file}, in {match[3]}"]
        self.indent = match.start(1) - len('File "')
        if own or not self.own:
            self.place = f"{match[1]}, line {match[2]}" + (f", in {match[3]}" if match[3] else "")
        self.own = self.own or own
        self.within += "".join(words for words, files in looks.WITHIN.items() if files.search(file))


@dataclass(eq=False)
class Seen:
    """What may be a failure: the lines that say it, what they look like, and what is known of it."""

    numbers: list
    text: str
    says: str  # see `looks.looks_like`
    known: Known | None = None
    label: str = ""
    trace: Trace | None = None
    message: list = field(default_factory=list)  # further lines of an exception's message: (number, text)

    @property
    def last(self) -> int:
        """Return the last line that says it."""
        return self.numbers[-1]

    @property
    def warns(self) -> bool:
        """Whether a logger wrote it as a warning."""
        return bool(WARNS.match(self.text)) or self.label.endswith("W")

    @property
    def uncaught(self) -> bool:
        """Whether an exception ended a process, and not only a thread beside it, or what a logger wrote of it."""
        return self.says == "exception" and not (self.trace and self.trace.thread or self.warns)


@dataclass
class Kind:
    """What all lines that differ in digits alone say."""

    notes: tuple  # see `looks.notes`
    seen: dict  # row of the table -> `Seen`
    looked: int = 0


class Log:
    """What the lines of a log say of the run; lines are numbered from 0.

    `seen` is what may be a failure; `steps`, `finite` (steps whose loss is a number), `restarts`, `done` (last words)
    and `ended` (the program's own ones) are numbers of lines; `end` is the last line that is not empty (number, text).
    """

    def __init__(self, text):
        self.data = as_bytes(text)
        self.lines = self.data.split(b"\n")
        self.starts = [0, *accumulate(len(line) + 1 for line in self.lines)]
        traced = self._having(TRACEBACK.encode(), 50)
        blocks = (self.lines[number : number + BLOCK] for number in sorted(traced))
        self.label = looks.label_of(self.lines[:BEGIN], blocks)
        self.seen, self.steps, self.finite, self.restarts, self.done, self.ended = ([] for _ in range(6))
        # of each label: a traceback, an exception, its message
        self.open, self.newest, self.message = {}, {}, {}
        self.findings = None  # see explain.py
        self.until = -1  # the line up to which each one is looked at
        self._read()
        redrawn = {number for seen in self.seen if seen.trace for number in self._redrawn(seen)}
        for numbers in (self.steps, self.finite, self.done):
            numbers[:] = [number for number in numbers if number not in redrawn]
        self.done = [number for number in self.done if number >= len(self.lines) - LAST]
        last = next((n for n in range(len(self.lines) - 1, -1, -1) if self.lines[n].strip()), 0)
        self.end = last, self.line(last)

    def _read(self):
        kinds, alarming = {}, None
        near_the_end = len(self.lines) - KINDS_OF_LINES
        notes = self.steps, self.finite, self.restarts, self.done, self.ended
        for number, raw in enumerate(self.lines):
            name = raw.translate(None, DIGITS)
            kind = kinds.get(name)
            if kind is None and len(kinds) >= KINDS_OF_LINES and self.until < number < near_the_end:
                alarming = alarming or {-1, *(n for word in ALARMS for n in self._having(word, HITS))}
                if number not in alarming:
                    continue
            if kind is None or number <= self.until or kind.seen and kind.looked < AGAIN:
                kind = self._look(number, kind)
                if kind is None:  # a line of a traceback or message
                    continue
                kinds[name] = kind
            elif kind.seen:
                next(reversed(kind.seen.values())).numbers.append(number)
            for numbers, says in zip(notes, kind.notes, strict=True):
                if says:
                    numbers.append(number)

    def _having(self, word, most) -> set:
        """Return the first and the last lines that hold a word: much faster than to look into each line."""
        found, first, last = set(), -1, len(self.data)
        for _ in range(most):
            first = self.data.find(word, first + 1)
            last = self.data.rfind(word, 0, last) if first >= 0 else -1
            if last < 0:
                break
            found |= {bisect_right(self.starts, first) - 1, bisect_right(self.starts, last) - 1}
        return found

    def _redrawn(self, seen) -> list:
        """Return the bars that were drawn again after an exception, at the count that they had before it."""
        at = bisect_right(self.steps, seen.last)
        before, after = [*self.steps[max(0, at - BARS) : at], seen.trace.begin], self.steps[at : at + BARS]
        counts = {bar[1] for number in before if (bar := looks.BAR.search(self.line(number)))}
        return [n for n in after if (bar := looks.BAR.search(self.line(n))) and bar[1] in counts]

    def line(self, number) -> str:
        """Return a line as it is shown."""
        return looks.seen_text(self.lines[number]).strip()

    def split(self, number) -> tuple:
        """Return a line's label, without times, and its text, which may be indented."""
        return looks.split(self.lines[number], self.label)[:2]

    def time(self, number) -> str:
        """Return when a line was written, in an order that text has too; "" if it does not say."""
        found = looks.DATE.search(self.line(number)[:80])
        return found[0].replace("T", " ") if found else ""

    def _look(self, number, kind) -> Kind | None:
        """Return what a line says; None for one that belongs to a traceback or to an exception's message."""
        label, text = self.split(number)
        for part in text.split("\n"):  # of a line of JSON several
            outer = self.message.get(label)
            if (
                FILE.match(part)
                and label not in self.open
                and (HEADLESS.match(part) or outer and not outer.message)
            ):
                self._begin(number, label)
            if TRACEBACK in part:
                self._begin(number, label)
            elif not (self._in_message(number, label, part) or self._in_traceback(number, label, part)):
                kind = self._alone(number, label, part, kind)
        return kind

    def _begin(self, number, label):
        """Begin a traceback."""
        self.message.pop(label, None)
        lines = (self.split(above) for above in range(number - 1, max(-1, number - 50), -1))
        above = next((text for own, text in lines if own == label and text.strip()), "")
        earlier = self.newest.get(label) if CHAIN.search(above) else None
        ignored = IGNORED.search(above) or earlier and earlier.trace.ignored
        self.open[label] = Trace(
            number, earlier, bool(ignored), bool(THREAD.search(above)), DIRECT in above
        )
        self._attend(number, OPEN)

    def _attend(self, number, lines):
        """Look at each of the next lines, if it is not the thousandth time that something happened."""
        if len(self.seen) < HITS or number > len(self.lines) - KINDS_OF_LINES:
            self.until = max(self.until, number + lines)

    def _in_traceback(self, number, label, text) -> bool:
        """Whether a line belongs to a traceback that its process has begun; other ranks may write in between."""
        trace = self.open.get(label)
        if not trace or number > trace.begin + OPEN:
            self.open.pop(label, None)
            return False
        if match := FILE.match(text):
            trace.frame(match)
        elif (said := text.lstrip(" |+")) and len(text) - len(said) < trace.indent and RAISED.match(said):
            del self.open[label]
            self.until = number if not self.open else self.until
            self._attend(number, MESSAGE)
            seen = Seen([number], said.strip(), "exception", label=label, trace=trace)
            self.newest[label] = self.message[label] = seen
            self.seen += [] if trace.ignored else [seen]
        else:
            marked = looks.MARKED.match(text)
            if marked or not trace.code:
                trace.code = text[marked.end() if marked else 0 :].strip()
            return text[:1].isspace() or text[:1] in "|+"
        return True

    def _in_message(self, number, label, text) -> bool:
        """Whether a line belongs to the message of the exception before it."""
        seen = self.message.get(label)
        if not seen:
            return False
        above = seen.message[-1][1] if seen.message else seen.text
        goes_on = above.endswith(":") or text[:1].isspace() and text.strip()
        ends = not text.strip() if seen.says == "exception" else not goes_on
        new = any(new.search(text) for new in looks.NEW if not (goes_on and new is looks.EXCEPTION))
        times = {looks.split(self.lines[line], self.label)[2] for line in (number, seen.numbers[0])}
        ends = ends and not seen.text.endswith(":") or number > seen.last + MESSAGE
        if ends or new or len(times) > 1:
            del self.message[label]
            return False
        if text.strip():
            seen.message.append((number, text.strip()))
        return True

    def _alone(self, number, label, text, kind) -> Kind:
        """Return what a line outside of tracebacks says, and note it if it may be a failure."""
        kind = kind or Kind(looks.notes(text), {})
        kind.looked += 1
        says = looks.looks_like(text)
        known = says and known_in("loss is nan" if says == "nan" else text)
        if not says or not known and says in ("hard", "soft", "nan"):
            return kind
        seen = kind.seen.get(known)
        if not seen:
            seen = kind.seen[known] = Seen([], text.strip(), says, known, label)
            self.seen.append(seen)
        seen.numbers.append(number)
        if says in ("exception", "error", "fault"):
            self.message[label] = seen
            self._attend(number, MESSAGE)
        return kind


def as_bytes(text) -> bytes:
    """Return a text as UTF-8, also if it is UTF-16 with a mark, and without NULs."""
    if isinstance(text, str):
        text = text.encode(errors="replace")
    elif text[:2] in UTF16:
        text = text.decode("utf-16", errors="replace").encode()
    return text.translate(None, b"\0")
