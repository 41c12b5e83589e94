"""Read a log as a support desk would: which of its lines are messages, what a run resumed after, how it ended."""

import re

from mpdemo.jobs.lines import Lines
from mpdemo.jobs.tracebacks import FILE, Tracebacks

MOST_LAST = 200  # lines at the end, in which the run may say that it is done
MOST_LINES = 5000  # lines at the end, in which progress is looked for
EXCEPTION = re.compile(r"(?:^|[\]:|)] ?)(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt)(?::|$)")
NEVER = re.compile(r"\s*$|(?:wandb|mlflow)(?!\.|.*\bERROR\b)|frame #\d+: |#\d+ .+ from \S+:\d+$")  # or C++'s frames
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


class Log(Lines):
    """What the lines of a log say of the run.

    `shown` are the lines that are looked at, `progress` those near the end that report a step, an epoch or a
    checkpoint, the last first; `end` is the last line that is not empty (number, text). `done` are the lines at the end
    in which the run says that it is done, `ended` those that only a program's own last line says.
    """

    def __init__(self, text):
        super().__init__(text)
        self.tracebacks = Tracebacks(self.split, self.having(b"Traceback (most recent"), len(self.lines))
        self.shown = sorted({*self.alarming(), *self.tracebacks.places})
        self.progress = self._progress()
        self.finite = [n for n in self.progress if LOSS.search(self.line(n)) and not NAN.search(self.line(n))][:1]
        last = next((n for n in range(len(self.lines) - 1, -1, -1) if self.lines[n].strip()), 0)
        self.end = last, self.line(last)
        ends = [(n, self.line(n)) for n in range(max(0, len(self.lines) - MOST_LAST), len(self.lines))]
        self.ended = [n for n, text in ends if ENDED.search(text) and not NOT_ENDED.search(text)]
        self.done = [n for n, text in ends if n in self.ended or DONE.search(text) and not NOT_DONE.search(text)]

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
            ends = number in self.tracebacks.places
            indented = text[:1].isspace() and not ends and number
            code = number in self.tracebacks.skipped or indented and FILE.match(self.split(number - 1)[1])
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
        return any(n > self.alike(number)[-1] for n in later)

    def survived(self, number) -> bool:
        """Whether the process that raised an exception trained on, or said later that its training ended."""
        label, _ = self.split(number)
        later = (n for n in [*self.progress, *self.ended] if n > self.alike(number)[-1])
        return any(self.split(n)[0] == label for n in later)

    def since_restart(self, seen) -> list:
        """Drop what was seen before the run resumed or was started anew, and made progress."""
        latest = self.progress[0] if self.progress else -1
        again = [self.alike(n)[-1] for n in self.shown if RESTART.search(self.line(n))]
        start = max((n for n in again if n < latest), default=-1)
        return [
            (number if number > start else next(n for n in self.alike(number) if n >= start), *rest)
            for number, *rest in seen
            if self.alike(number)[-1] > start
        ]

    def ended_well(self, seen) -> bool:
        """Whether nothing that was seen is a failure: (number, is a mere consequence, what it looks like) of each."""
        if any(says == "nan" for _, _, says in seen):
            return False
        lasts = [self.alike(number)[-1] for number, _, _ in seen]
        if all(follows and says in ("soft", "noise", "exception") for _, follows, says in seen):
            harmless = all(says != "exception" for _, _, says in seen)
            return harmless or bool(self.done) and self.done[0] < min(lasts)
        worked = self.progress and self.progress[0] > max(lasts)
        return bool(self.done and worked and self.done[-1] > max(lasts))
