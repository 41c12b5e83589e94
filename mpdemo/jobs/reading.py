"""Read a log as a support desk would: which of its lines are messages, what a run resumed after, whether it ended well.

A log may have a million lines, nearly all of which differ in numbers alone: these are looked at once.
"""

import re
from collections import Counter
from itertools import islice

MOST_TRACEBACKS = 1000  # that are followed to their exception
MOST_LAST = 200  # lines at the end, in which the run may say that it is done
MOST_LINES = 5000  # messages at the beginning, and as many at the end, that are looked at
# Of a log with more than MOST_LINES different lines, only those with one of these are looked at (no digits).
ALARMS = b"""Traceback rror xception ailed illed WARN CANCELLED annot ERR FAIL FATAL atal oom OOM emory imed imeout TIME
found uch space enied efused nable ssert bort ignal fault exitcode erminate must xpected nvalid xceeded uota lready
ismatch upported ECC Xid Interrupt PMI symbol esum estart ttempt heckpoint rrno DUE shm STATUS GLIBC ibv_ dtype SIG
conda module state_dict uplicate closed route known nan NaN malformed locked exclusive match""".split()
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
HARMLESS_TRACEBACK = re.compile(r"Logging error|Exception ignored|Error in (?:atexit|sys\.excepthook)")
CHAIN = re.compile(r"During handling of the above exception|The above exception was the direct cause")
SAYS_LITTLE = re.compile(r"(?:KeyError: .*|[\w.]+:?\s*)$")  # of an exception that a library caught by itself
WEB = re.compile(r"/(?:urllib3?|requests|http|httpx|httpcore|aiohttp)/")
NEVER = re.compile(r"\s*$|(?:wandb|mlflow)(?!\.|.*\bERROR\b)")
NOISE = re.compile(r"(?:wandb|mlflow)(?!\.)")  # only an exception of theirs ends a run
HARMLESS = re.compile(
    r"^(?:wandb:|mlflow|INFO|DEBUG)\b|NCCL INFO|\[I |ServerApp|[Rr]etrying|trying (?!to)\w|will retry|"
    r"alling back|[Ii]gnor|ing this combination"
)
ERROR = re.compile(r"(?:^|[\s\[|:])(?:ERROR|FATAL|CRITICAL|[Ee]rror|[Ff]atal)(?:\]|:| -)")
HARD = re.compile(
    r"^srun: |^slurmstepd|exitcode|Killed|core dumped|Aborted|terminate called|atchdog|CANCELLED AT|^\[E|"
    r"Segmentation fault|ssertion `"
)
PROGRESS = re.compile(
    r"\b(?:global_)?(?:epochs?|step|iter(?:ation)?s?|loss|batch)\b\W*\d|it/s|s/it|(?:images|samples|tokens|tok)/s|"
    r"\bsav(?:ed|ing)\b.*\bcheckpoint|\bcheckpoint\b.*\bsaved\b",
    re.I,
)
LOSS = re.compile(r"^(?!.*train_runtime).*loss\b[\"']?[\s:=]*(?:tensor\()?\d", re.I)
NAN = re.compile(r"\b(?:\w*loss|grad_?norm)\b[\"']?[\s:=]*(?:tensor\()?[\"']?nan\b", re.I)
RESTART = re.compile(
    r"[Rr]esum(?:ed|ing|es)\b|[Rr]estor(?:ed|ing)\b|[Rr]estart(?:ing|ed)?\b|[Aa]ttempt \d|oad(?:ed|ing) \w*checkpoint"
)
ENDED = re.compile(  # what the program itself says after its last step
    r"\btraining\b(?: (?!not|never)\w+){0,2} (?:done|finished|completed?|ended|successful(?:ly)?)\b|"
    r"\b(?:finished|completed|done) (?:with )?training\b|`Trainer\.fit` stopped: |['\"]train_runtime['\"]",
    re.I,
)
DONE = re.compile(r"\b(?:done|finished|completed?|succe\w+|ended well|elapsed|best|final)\b|100%|exit code 0", re.I)
NOT_ENDED = re.compile(r"fail|error|exception|abort|interrupt", re.I)
NOT_DONE = re.compile(r"\b(?:not|un|never|before)\b|fail|error|^wandb", re.I)


def unlabelled(log) -> list[str]:
    """Return the lines of a log without a launcher's labels."""
    return [line[LABEL.match(line).end() :] for line in log.splitlines()]


class Log:
    """The lines of a log, numbered from 0, with `end`, the last that is not empty (number, text).

    `places` has the user's own file and line for each line in which a traceback ends, `chained` those of them that
    came up while an earlier exception was handled, `web` those raised inside a library for downloads; `done` are the
    lines at the end in which the run says that it is done, `ended` those that only a program's own last line says.
    """

    def __init__(self, text):
        data = text.encode(errors="replace") if isinstance(text, str) else text
        self.lines = data.split(b"\n")
        self.keys = data.translate(None, b"0123456789").split(b"\n")
        self.counts = Counter(self.keys)
        self.last = dict(zip(self.keys, range(len(self.keys)), strict=True))
        self.places, self.skipped, self.chained, self.web, self.raised = {}, set(), set(), set(), {}
        tracebacks = [number for number, key in enumerate(self.keys) if b"Traceback (most recent" in key]
        for number in tracebacks[:MOST_TRACEBACKS]:
            self._follow(number)
        self.shown = sorted({*self._alarming(), *self.places})
        self.progress = self._progress()
        self.finite = [n for n in self.progress if LOSS.search(self.line(n)) and not NAN.search(self.line(n))][:1]
        last = next((n for n in range(len(self.lines) - 1, -1, -1) if self.lines[n].strip()), 0)
        self.end = last, self.line(last)
        ends = [(n, self.line(n)) for n in range(max(0, len(self.lines) - MOST_LAST), len(self.lines))]
        self.ended = [n for n, text in ends if ENDED.search(text) and not NOT_ENDED.search(text)]
        self.done = [n for n, text in ends if n in self.ended or DONE.search(text) and not NOT_DONE.search(text)]

    def _alarming(self) -> list:
        """Return the number of one line of each kind; of too many kinds, of those with an alarming word."""
        first = dict(zip(reversed(self.keys), range(len(self.keys) - 1, -1, -1), strict=True))
        if len(first) <= MOST_LINES:
            return list(first.values())
        alarms = re.compile(b"|".join(ALARMS if len(first) < 20 * MOST_LINES else FEW_ALARMS))
        numbers = sorted(first.values())
        found = list(islice((n for n in numbers if alarms.search(self.keys[n])), MOST_LINES))
        if len(found) < MOST_LINES:
            return found
        return found + list(islice((n for n in reversed(numbers) if alarms.search(self.keys[n])), MOST_LINES))

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

    def _before(self, start, label) -> str:
        """Return the text above a line: the last one of the same process that is not empty."""
        above = (self.split(number) for number in range(start - 1, max(-1, start - 50), -1))
        return next((text for own, text in above if own == label and text.strip()), "")

    def _follow(self, start):
        """Find the line in which a traceback ends; other ranks may write in between."""
        label, _ = self.split(start)
        above = self._before(start, label)
        earlier = self.raised.get(label) if CHAIN.search(above) else None
        harmless = HARMLESS_TRACEBACK.search(above) or earlier in self.skipped
        place, web = "", False
        for number in range(start + 1, min(start + 400, len(self.lines))):
            own, text = self.split(number)
            if own != label:
                continue
            if match := FILE.match(text):
                if not place or not NOT_THE_USERS.search(match[1]):
                    place = f"{match[1]}, line {match[2]}" + (f", in {match[3]}" if match[3] else "")
                web = web or bool(WEB.search(match[1]))
                self.skipped.add(number)
            elif text[:1].isspace() or text[:1] in "|+":
                self.skipped.add(number)
            elif RAISED.match(text):
                self.raised[label] = number
                if harmless:
                    self.skipped.add(number)
                    return
                self.places[number] = place
                if web:
                    self.web.add(number)
                if earlier is not None:
                    self._chain(earlier, number)
                return

    def _chain(self, earlier, number):
        """Note which of two exceptions counts: the first, unless a library caught it and it says nothing."""
        if SAYS_LITTLE.match(self.split(earlier)[1]) and NOT_THE_USERS.search(self.places[earlier]):
            del self.places[earlier]
            self.skipped.add(earlier)
        else:
            self.chained.add(number)

    def _progress(self) -> list:
        """Return the numbers of the lines near the end that report a step, an epoch or a checkpoint, the last first."""
        texts = ((n, self.line(n)) for n in range(len(self.lines) - 1, max(-1, len(self.lines) - MOST_LINES), -1))
        return [
            number
            for number, text in texts
            if PROGRESS.search(text) and not HARMLESS.search(text.removeprefix("INFO")) and not EXCEPTION.search(text)
        ]

    def messages(self):
        """Yield number and text of each line that may say what went wrong, and what it looks like."""
        for number in self.shown:
            _, text = self.split(number)
            ends = number in self.places
            indented = text[:1].isspace() and not ends and number
            code = number in self.skipped or indented and FILE.match(self.split(number - 1)[1])
            if code or NEVER.match(text) and not ends:
                continue
            if NOISE.match(text) and not ends:
                yield number, text.strip(), "noise"
            elif ends or EXCEPTION.search(text[:200]):
                yield number, text.strip(), "exception"
            elif NAN.search(text) or not HARMLESS.search(text):
                yield number, text.strip(), self._says(number, text)

    def _says(self, number, text) -> str:
        if NAN.search(text):
            return "nan"
        if HARD.search(text):
            return "fault" if ERROR.search(text) else "hard"
        if "NCCL WARN" in text or number and self.line(number - 1).endswith("Last error:"):
            return "nccl"
        return "error" if ERROR.search(text) else "soft"

    def went_on(self, number, says) -> bool:
        """Whether the run made progress after a line, and the lines like it, that need not be a failure."""
        later = self.finite if says == "nan" else self.progress[1:2]
        return any(n > self.last[self.keys[number]] for n in later)

    def survived(self, number) -> bool:
        """Whether the process that raised an exception trained on, or said later that its training ended."""
        label, _ = self.split(number)
        later = (n for n in [*self.progress, *self.ended] if n > self.last[self.keys[number]])
        return any(self.split(n)[0] == label for n in later)

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
        if any(says == "nan" for _, _, says in seen):
            return False
        lasts = [self.last[self.keys[number]] for number, _, _ in seen]
        if all(follows and says in ("soft", "noise", "exception") for _, follows, says in seen):
            return (
                all(says in ("soft", "noise") for _, _, says in seen) or bool(self.done) and self.done[0] < min(lasts)
            )
        worked = self.progress and self.progress[0] > max(lasts)
        return bool(self.done and worked and self.done[-1] > max(lasts))
