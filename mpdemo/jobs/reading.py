"""Read a log as a support desk would: which of its lines are messages, what a run resumed after, whether it ended well.

A log may have a million lines, nearly all of which differ in numbers alone: these are looked at once.
"""

import re
from collections import Counter

MOST_TRACEBACKS = 1000  # that are followed to their exception
MOST_LAST = 200  # lines at the end, in which the run may say that it is done
MOST_LINES = 5000  # messages at the beginning, and as many at the end, that are looked at
# Of a log with more than MOST_LINES different lines, only those with one of these are looked at (no digits).
ALARMS = b"""Traceback rror xception ailed illed WARN CANCELLED annot ERR FAIL FATAL atal oom OOM emory imed imeout TIME
found uch space enied efused nable ssert bort ignal fault exitcode erminate must xpected nvalid xceeded uota lready
ismatch upported ECC Xid Interrupt PMI symbol esum estart ttempt heckpoint rrno DUE shm STATUS GLIBC ibv_ dtype SIG
conda module state_dict uplicate closed route known""".split()
FEW_ALARMS = ALARMS[:8]  # and of 20 times as many
LABEL = re.compile(  # of a launcher, before each line of a rank: [rank3]: [default3]: 3: [1,3]<stderr>: (Actor pid=1)
    r"(?:\[(?:rank|default)?\d+\]:? ?|\[\d+,\d+\]<std\w+>: ?|\d+: ?|\(\w[^()]*pid=[^()]*\) ?|[\w.-]+ +\| ?)*"
)
TIME = re.compile(r"^\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)? ?")
UNSEEN = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\t\x20-\x7e\xa0-\U0010ffff]")  # colours and control characters
FILE = re.compile(r'\s*(?:\| )?File "(.+?)", line (\d+)(?:, in (\S+))?')
NOT_THE_USERS = re.compile(r"site-packages|dist-packages|/lib/python\d|^<|/bin/(?:torchrun|accelerate|deepspeed)")
RAISED = re.compile(r"[A-Za-z_][\w.]*(?::\s|:?$)")  # the line that ends a traceback
EXCEPTION = re.compile(r"(?:^|[\]:|)] ?)(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt)(?::|$)")
HARMLESS_TRACEBACK = re.compile(r"Logging error|Exception ignored|Error in atexit")
NEVER = re.compile(r"\s*$|wandb|mlflow")
HARMLESS = re.compile(
    r"^(?:wandb:|mlflow|INFO|DEBUG)\b|NCCL INFO|\[I |ServerApp|[Rr]etrying|trying (?!to)\w|will retry|"
    r"alling back|[Ii]gnor"
)
ERROR = re.compile(r"(?:^|[\s\[|:])(?:ERROR|FATAL|CRITICAL|[Ee]rror|[Ff]atal)(?:\]|:| -)")
HARD = re.compile(
    r"^srun: |^slurmstepd|exitcode|Killed|core dumped|Aborted|terminate called|atchdog|CANCELLED AT|^\[E|"
    r"Segmentation fault|ssertion `"
)
PROGRESS = re.compile(r"\b(?:epoch|step|iter(?:ation)?|loss|batch)\b\W*\d|it/s|s/it|(?:images|samples|tokens)/s", re.I)
RESTART = re.compile(
    r"[Rr]esum(?:ed|ing|es)\b|[Rr]estor(?:ed|ing)\b|[Rr]estart(?:ing|ed)?\b|[Aa]ttempt \d|oad(?:ed|ing) \w*checkpoint"
)
DONE = re.compile(r"\b(?:done|finished|completed?|succe\w+|ended well|elapsed|best|final)\b|100%|exit code 0", re.I)
NOT_DONE = re.compile(r"\b(?:not|un|never|before)\b|fail|error|^wandb", re.I)


def unlabelled(log) -> list[str]:
    """Return the lines of a log without a launcher's labels."""
    return [line[LABEL.match(line).end() :] for line in log.splitlines()]


class Log:
    """The lines of a log, numbered from 0, with `end`, the last that is not empty (number, text).

    `places` has the user's own file and line for each line in which a traceback ends; `done` are the lines at the end
    in which the run says that it is done.
    """

    def __init__(self, text):
        data = text.encode(errors="replace") if isinstance(text, str) else text
        self.lines = data.split(b"\n")
        self.keys = data.translate(None, b"0123456789").split(b"\n")
        self.counts = Counter(self.keys)
        self.last = dict(zip(self.keys, range(len(self.keys)), strict=True))
        self.places, self.skipped = {}, set()
        tracebacks = [number for number, key in enumerate(self.keys) if b"Traceback (most recent" in key]
        for number in tracebacks[:MOST_TRACEBACKS]:
            self._follow(number)
        first = dict(zip(reversed(self.keys), range(len(self.keys) - 1, -1, -1), strict=True))
        if len(first) > MOST_LINES:
            alarms = ALARMS if len(first) < 20 * MOST_LINES else FEW_ALARMS
            first = {key: number for key, number in first.items() if any(alarm in key for alarm in alarms)}
        self.shown = sorted({*first.values(), *self.places})
        if len(self.shown) > 2 * MOST_LINES:
            self.shown = self.shown[:MOST_LINES] + self.shown[-MOST_LINES:]
        self.progress = self._last_progress()
        last = next((n for n in range(len(self.lines) - 1, -1, -1) if self.lines[n].strip()), 0)
        self.end = last, self.line(last)
        ends = [(n, self.line(n)) for n in range(max(0, len(self.lines) - MOST_LAST), len(self.lines))]
        self.done = [n for n, text in ends if DONE.search(text) and not NOT_DONE.search(text)]

    def line(self, number) -> str:
        """Return a line as it is shown."""
        return self._shown(number).strip()

    def _shown(self, number) -> str:
        """Of a progress bar its last state, no colours."""
        return UNSEEN.sub("", self.lines[number].rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))

    def split(self, number) -> tuple:
        """Return a line's label and its text, which may be indented."""
        text = TIME.sub("", self._shown(number))
        end = LABEL.match(text).end()
        return text[:end].strip(), text[end:]

    def _follow(self, start):
        """Find the line in which a traceback ends; other ranks may write in between."""
        label, _ = self.split(start)
        place, harmless = "", start and HARMLESS_TRACEBACK.search(self.line(start - 1))
        for number in range(start + 1, min(start + 400, len(self.lines))):
            own, text = self.split(number)
            if own != label:
                continue
            if match := FILE.match(text):
                if not place or not NOT_THE_USERS.search(match[1]):
                    place = f"{match[1]}, line {match[2]}" + (f", in {match[3]}" if match[3] else "")
                self.skipped.add(number)
            elif text[:1].isspace() or text[:1] in "|+":
                self.skipped.add(number)
            elif RAISED.match(text):
                if harmless:
                    self.skipped.add(number)
                else:
                    self.places[number] = place
                return

    def _last_progress(self) -> list:
        """Return the numbers of the last two lines that report a step or an epoch, the last one first."""
        found = []
        for number in range(len(self.lines) - 1, max(-1, len(self.lines) - MOST_LINES), -1):
            text = self.line(number)
            if PROGRESS.search(text) and not HARMLESS.search(text) and not EXCEPTION.search(text):
                found.append(number)
                if len(found) == 2:
                    break
        return found

    def messages(self):
        """Yield number and text of each line that may say what went wrong, and what it looks like."""
        for number in self.shown:
            _, text = self.split(number)
            ends = number in self.places
            indented = text[:1].isspace() and not ends and number
            code = number in self.skipped or indented and FILE.match(self.split(number - 1)[1])
            if code or NEVER.match(text):
                continue
            raised = ends or EXCEPTION.search(text[:200])
            if raised or not HARMLESS.search(text):
                yield number, text.strip(), "exception" if raised else self._says(number, text)

    def _says(self, number, text) -> str:
        if HARD.search(text):
            return "fault" if ERROR.search(text) else "hard"
        if "NCCL WARN" in text or number and self.line(number - 1).endswith("Last error:"):
            return "nccl"
        return "error" if ERROR.search(text) else "soft"

    def went_on(self, number) -> bool:
        """Whether the run made progress after a line, and the lines like it, that need not be a failure."""
        return len(self.progress) == 2 and self.last[self.keys[number]] < self.progress[1]

    def since_restart(self, seen) -> list:
        """Drop what was seen before the run resumed or was started anew, and made progress."""
        latest = self.progress[0] if self.progress else -1
        again = [self.last[self.keys[n]] for n in self.shown if RESTART.search(self.line(n))]
        start = max((n for n in again if n < latest), default=-1)
        return [
            (number if number > start else self.keys.index(self.keys[number], start), *rest)
            for number, *rest in seen
            if self.last[self.keys[number]] > start
        ]

    def ended_well(self, seen) -> bool:
        """Whether nothing that was seen is a failure: (number, is a mere consequence, what it looks like) of each."""
        lasts = [self.last[self.keys[number]] for number, _, _ in seen]
        if all(follows and says in ("soft", "exception") for _, follows, says in seen):
            return all(says == "soft" for _, _, says in seen) or bool(self.done) and self.done[0] < min(lasts)
        worked = self.progress and self.progress[0] > max(lasts)
        return bool(self.done and worked and self.done[-1] > max(lasts))
