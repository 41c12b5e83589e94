"""Find the known failures in a log; say what each one is, what to do, and whether to try again.

The failures are data, in known_failures.toml; how a log is read stands in reading.py. Taught in
notebooks/11_when_it_breaks.ipynb.
"""

from dataclasses import dataclass, replace

from mpdemo import paths
from mpdemo.jobs.known import KINDS, UNKNOWN, Known, known_in
from mpdemo.jobs.reading import Log

LONGEST = 240  # characters of a line that are shown
ALSO = 4  # further findings that are shown, in one line each
MESSAGE = 12  # lines that the message of an exception may take
DOWNLOAD, NAN = " (in a download)", "loss is nan"  # words of the table for what a line alone does not say


@dataclass
class Finding:
    """A failure in a log: the first line that shows it (its number, its text), and how many lines do."""

    known: Known
    number: int
    line: str
    count: int = 1
    place: str = ""  # the user's own file and line, where a traceback names them

    def as_dict(self) -> dict:
        """The same for programs."""
        what, do = self.known.explained(self.line)
        found = {"line": self.number, "text": self.line, "count": self.count, "place": self.place}
        return found | {"kind": self.known.kind, "what": what, "do": do}

    @property
    def paragraph(self) -> str:
        """The line, what it is and what to do."""
        more = f" (and {self.count - 1} more)" * (self.count > 1)
        match = self.known.pattern.search(self.line)
        lines = [_shown(self.number, self.line, match.start() if match else 0) + more]
        if self.place:
            lines.append(f"  where: {self.place.replace(f'{paths.root()}/', '')}")
        what, do = self.known.explained(self.line)
        lines += [f"  what it is: {what}", f"  what to do: {do}"]
        if self.known.notebook:
            lines.append(f"  read: notebooks/{self.known.notebook}.ipynb")
        return "\n".join(lines)


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
        if key not in findings:
            findings[key] = Finding(known, number + 1, log.line(number), 0, log.tracebacks.places.get(number, ""))
        findings[key].count += len(log.alike(number))
    return sorted(findings.values(), key=lambda finding: (KINDS.index(finding.known.kind), finding.number))


def _seen(log):
    """Yield number and `Known` of each line that may be a failure, and what it looks like."""
    for number, text, says in log.messages():
        known = known_in(text + DOWNLOAD * (number in log.tracebacks.web))
        if not known:
            known = known_in(NAN) if says == "nan" else UNKNOWN.get(says.replace("fault", "error"))
        if known and not (says in ("soft", "nccl", "error", "nan", "noise") and log.went_on(number, says)):
            follows = says == "noise" or number in log.tracebacks.chained
            yield number, replace(known, kind="consequence") if follows else known, says


def report(text: str | Log) -> str:
    """Return what a log, `text`, shows: the first cause and what to do, then the rest; or that the run ended well."""
    log = text if isinstance(text, Log) else Log(text)
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


def verdict(findings, state="", resumes=False) -> tuple:
    """Say whether to start a job again as it is: ``retry`` or ``fix`` (None: neither), and why.

    `resumes`: the same command continues from a checkpoint.
    """
    first = findings[0] if findings else None
    longer = "give it a longer time limit, or checkpoints and --resume auto"
    by_state = {
        "pending": (None, "it waits in the queue"),
        "done": (None, "it ended well"),
        "stopped": ("retry", "it stopped with a checkpoint, from which the same command resumes"),
        "node_failure": ("retry", "a node failed"),
        "timeout": ("retry", "it resumes from its last checkpoint") if resumes else ("fix", longer),
    }
    if state in by_state:
        return by_state[state]
    if state == "cancelled" and (first is None or first.known.kind != "cause"):
        return "retry", "it was cancelled"
    if first:
        what, do = first.known.explained(first.line)
        return ("retry", what) if first.known.retry else ("fix", do)
    if state in ("failed", "out_of_memory"):
        return "fix", "its log names no known failure: read its last lines"
    return None, "it still runs; --live says where its ranks are" if state == "running" else "no failure is in the log"
