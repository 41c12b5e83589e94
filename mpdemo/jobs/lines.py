"""The lines of a log: their labels, and which of a million are worth a look.

Nearly all lines of a long log differ in numbers alone, so one of each kind is looked at.
"""

import math
import re
from bisect import bisect_right
from itertools import accumulate

MOST_HITS = 20_000  # lines with an alarming word at the beginning, and as many at the end, that are compared
MOST_KINDS = 5000  # of lines that are looked at: half of them the first, half the last
# Of a log with more than MOST_KINDS different lines, only those with one of these are looked at (no digits): the few
# where there are 20 times as many.
FEW_ALARMS = b"Traceback rror xception ailed illed emory esum annot WARN CANCELLED".split()
ALARMS = (
    FEW_ALARMS
    + b"""ERR FAIL FATAL atal oom OOM imed imeout TIME found uch space enied efused nable ssert bort ignal
fault exitcode erminate must xpected nvalid xceeded uota lready ismatch upported ECC Xid Interrupt PMI symbol estart
ttempt heckpoint rrno DUE shm STATUS GLIBC ibv_ dtype SIG conda module state_dict uplicate closed route known nan NaN
malformed locked exclusive match""".split()
)
DIGITS = b"0123456789"
LABEL = re.compile(  # of a launcher, before each line of a rank: [rank3]: [default3]: 3: [1,3]<stderr>: (Actor pid=1)
    r"(?:\[(?:rank|default)?\d+\]:? ?|\[\d+,\d+\]<std\w+>: ?|\d+: ?|\(\w[^()]*pid=[^()]*\) ?|[\w.-]+ +\| ?)*"
)
TIME = re.compile(r"^\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)? ?")
UNSEEN = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\t\x20-\x7e\xa0-\U0010ffff]")  # colours and control characters


def unlabelled(log) -> list[str]:
    """Return the lines of a log without a launcher's labels."""
    return [line[LABEL.match(line).end() :] for line in log.splitlines()]


class Lines:
    """The lines of a log, numbered from 0; `numbers` has those of each kind, which differ in digits alone."""

    def __init__(self, text):
        self.data = text.encode(errors="replace") if isinstance(text, str) else text
        self.lines = self.data.split(b"\n")
        self.starts = [0, *accumulate(len(line) + 1 for line in self.lines)]
        self.numbers = self._of_one_kind(range(len(self.lines)), 20 * MOST_KINDS)
        if self.numbers is None:
            hits = sorted({number for word in FEW_ALARMS for number in self.having(word)})
            self.numbers = self._of_one_kind(sorted({*hits[:MOST_HITS], *hits[-MOST_HITS:]}))

    def having(self, word) -> list:
        """Return the numbers of the lines that hold a word: much faster than to look into each line."""
        found, at = [], self.data.find(word)
        while at >= 0:
            found.append(bisect_right(self.starts, at) - 1)
            at = self.data.find(word, self.starts[found[-1] + 1])
        return found

    def _of_one_kind(self, numbers, most=math.inf) -> dict | None:
        """Return the numbers of the lines of each kind; None as soon as there are too many kinds."""
        kinds = {}
        for number in numbers:
            kinds.setdefault(self.kind(number), []).append(number)
            if len(kinds) > most:
                return None
        return kinds

    def kind(self, number) -> bytes:
        """Return what a line has in common with those that differ from it in digits alone."""
        return self.lines[number].translate(None, DIGITS)

    def alike(self, number) -> list:
        """Return the numbers of the lines of one kind."""
        return self.numbers.get(self.kind(number), [number])

    def alarming(self) -> list:
        """Return the number of one line of each kind; of too many kinds, of those with an alarming word."""
        if len(self.numbers) <= MOST_KINDS:
            return [numbers[0] for numbers in self.numbers.values()]
        alarms = re.compile(b"|".join(ALARMS))
        found = [numbers[0] for kind, numbers in self.numbers.items() if alarms.search(kind)]
        return found[: MOST_KINDS // 2] + found[-MOST_KINDS // 2 :]

    def line(self, number) -> str:
        """Return a line as it is shown."""
        return self._shown(number).strip()

    def _shown(self, number) -> str:
        """Return the last state of a progress bar, and no colours."""
        return UNSEEN.sub("", self.lines[number].rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))

    def split(self, number) -> tuple:
        """Return a line's label and its text, which may be indented."""
        text = TIME.sub("", self._shown(number))
        end = LABEL.match(text).end()
        return text[:end].strip(), text[end:]
