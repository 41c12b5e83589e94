"""Find the known failures in a log; say what each one is, what to do, and whether to try again.

The failures are data, in known_failures.toml; how a log is read stands in reading.py. Taught in
notebooks/60_crash.ipynb.
"""

import re
from dataclasses import dataclass, replace
from itertools import pairwise

from mpdemo import paths
from mpdemo.tools.explain import looks
from mpdemo.tools.explain.known import BLAMED, KINDS, UNKNOWN, Known, known_in, spelled
from mpdemo.tools.explain.reading import Log, Seen
from mpdemo.tools.explain.unknown import advice, unknown, with_ranks

LONGEST = 240  # characters of a line that are shown
ALSO = 4  # further findings that are shown, in one line each
STEPS = 5000  # at the end, whose rank is looked up
BEFORE = 20  # lines before a launcher's report in which a program's last words are looked for


@dataclass
class Finding:
    """A failure in a log: the first line that shows it (its number, its text), and how many lines do."""

    known: Known
    number: int
    line: str
    count: int = 1
    place: str = ""  # the user's own file and line, where a traceback names them
    label: str = ""  # of the process, as the launcher has put it before the line

    @property
    def explained(self) -> tuple[str, str]:
        """What it is and what to do."""
        return self.known.explained(self.line.removeprefix(self.label).strip())

    def as_dict(self) -> dict:
        """The same for programs."""
        what, do = self.explained
        found = {"line": self.number, "text": self.line, "count": self.count, "place": self.place}
        return found | {"kind": self.known.kind, "what": what, "do": do}

    @property
    def paragraph(self) -> str:
        """The line, what it is and what to do."""
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        match = self.known.pattern.search(self.line)
        lines = [_shown(self.number, self.line, match.start() if match else 0) + more]
        if self.place:
            lines.append(f"  where: {self.place.replace(f'{paths.root()}/', '')}")
        what, do = self.explained
        lines += [f"  what it is: {what}", f"  what to do: {do}"]
        if self.known.page:
            lines.append(f"  read: {self.known.page}")
        return "\n".join(lines)


def find(text: str | Log) -> list:
    """Return the `Finding` of each failure in `text`, a log of one or many processes, the first real cause first.

    A run that ended well has none: what went wrong before it resumed or went on is no failure.
    """
    log = text if isinstance(text, Log) else Log(text)
    if log.findings is None:
        log.findings, found = [], list(_found(log))
        for kind in KINDS:
            some = [(log.time(f.number - 1), f.number, f) for f in found if f.known.kind == kind]
            timed = all(time for time, *_ in some)  # else the lines' order counts
            log.findings += [f for *_, f in sorted(some, key=lambda found: found[not timed : 2])]
    return log.findings


def _found(log):
    seen = [s for s in _since_restart(log, _judged(log)) if not _went_on(log, s)]
    for s in seen:
        s.known = replace(s.known, kind=weigh(s))
    seen = [s for s in seen if s.known.kind]
    rest = [s for s in seen if not (s.says == "exception" and _survived(log, s))]
    if _ended_well(log, rest):
        return []
    if any(s.known.kind in ("node", "cause") for s in rest):
        seen = rest
    return _findings(log, seen + _last_words(log, seen))


def weigh(s) -> str:
    """Return the kind of evidence that something seen is, of `KINDS`: a row counts as what its line is.

    "" for the words of a row in a line that reports no failure, but mentions a path or a setting.
    """
    if s.known.kind == "unknown" and (s.says == "exception" or looks.FATAL.search(s.text)):
        refers = looks.REFERS.search(s.text) or looks.BARE.match(s.text)
        return "vague" if refers else "cause" if s.trace and s.uncaught else "error"
    if s.known.kind != "cause" or s.says in ("exception", "hard", "exit", "fault", "words"):
        return s.known.kind
    if s.says == "error" and not s.warns:
        return "error"
    return "warning" if looks.FAILS.search(spelled(s.text)[0]) else ""


def _judged(log) -> list:
    """Return what the log shows, with what is known of it; of exceptions in a chain, the one that explains counts."""
    best = {}
    for s in log.seen:
        if s.says in ("exception", "error", "fault"):
            _of_message(s)
        s.known = s.known or UNKNOWN.get(s.says)
        if s.known is UNKNOWN["nccl"] and log.steps and s.numbers[0] > log.steps[-1]:
            # it warned when the training had run, not of its start
            s.known = replace(s.known, kind="waiting")
        if s.known and _after_the_end(log, s):
            s.known = replace(s.known, kind="consequence")
        if rival := s.trace and s.trace.earlier:
            rival = best.get(rival, rival)
            if _explains(s, rival):
                rival.known = None
            else:
                best[s] = rival
                s.known = s.known and replace(s.known, kind="consequence")
    return sorted((s for s in log.seen if s.known), key=lambda s: s.numbers[0])


def _explains(s, rival) -> bool:
    """Whether an exception explains what happened, and the one before it in a chain doesn't: first come, first told."""
    if s.known.kind == "consequence" or not rival.known or rival.known.kind == "consequence":
        return s.known.kind != "consequence"
    if looks.SAYS_LITTLE.match(rival.text) and looks.LIBRARY.search(rival.trace.place):
        return True
    advised = not s.known.seen and advice(s.text)
    return bool(advised and (s.trace.direct or not (rival.known.seen or advice(rival.text))))


def _after_the_end(log, s) -> bool:
    """Whether Slurm has cancelled the job that is killed; or the training has ended, and a thread fails or warns."""
    if looks.KILLED.search(s.text):
        trained = (log.steps or [-1])[-1]
        return any(trained < end.last < s.numbers[0] for end in log.seen if looks.CANCELS.search(end.text))
    return (s.trace and s.trace.thread or s.warns) and any(number < s.last for number in log.ended)


def _of_message(s):
    """Take the line of a message that says most of it, of a wrapper the innermost, and what is known of this line."""
    if looks.BARE.match(s.text) and s.message:
        s.text += f" {s.message.pop(0)[1]}"
    lines = [(s.numbers[0], s.text), *s.message]
    place, besides = (" ".join(s.trace.inner), s.trace.within) if s.trace else ("", "")
    place += f" {s.text}"  # whose words say what those of the next lines are about
    rows = [(known_in(text + besides, place=place), number, text) for number, text in lines]
    rows += [(UNKNOWN["nccl"], *line) for (_, before), line in pairwise(lines) if before == "Last error:"]
    # a later line that reports another process's end says nothing of this one
    rows = [row for row in rows if row[0] and (row[1] == s.numbers[0] or row[0].kind != "consequence")]
    reports = s.uncaught and looks.REPORTS.search(s.text) and not advice(s.text)
    rows = rows or [(UNKNOWN["exit"], *lines[0])] * bool(reports)
    wraps = looks.WRAPS.search(s.text)
    found = sorted(rows[:: -1 if wraps else 1], key=lambda row: KINDS.index(row[0].kind))
    inner = [line for line in lines if wraps and looks.EXCEPTION.search(line[1])] or lines[:1]
    s.known, number, text = found[0] if found else (unknown(s), *inner[-1])
    if number != s.numbers[0]:
        s.numbers, s.text = [number, *s.numbers[1:]], text


def _since_restart(log, seen) -> list:
    """Drop what was seen before the run resumed or was started anew, and made progress."""
    start = max((n for n in log.restarts if n < (log.steps or [-1])[-1]), default=-1)
    seen = [s for s in seen if s.last > start]
    for s in seen:
        s.numbers = [number for number in s.numbers if number > start]
    return seen


def _went_on(log, s) -> bool:
    """Whether the run made progress after lines that need not be a failure."""
    later = log.finite[-1:] if s.says == "nan" else log.steps[-2:-1]
    return s.says not in ("exception", "hard", "fault") and any(n > s.last for n in later)


def _survived(log, s) -> bool:
    """Whether the process that raised an exception trained on, or said later that its training ended."""
    later = [n for n in [*log.steps[-STEPS:], *log.ended] if n > s.last]
    return any(log.split(n)[0] == s.label for n in reversed(later))


def _ended_well(log, seen) -> bool:
    """Whether nothing that was seen is a failure."""
    end = max(log.steps[-1:] + log.done, default=-1)
    if any(s.says == "nan" or s.uncaught and s.last > end for s in seen):
        return False
    if all(s.known.kind == "consequence" and s.says in ("soft", "exception") for s in seen):
        return True
    return bool(log.done and log.steps) and min(log.steps[-1], log.done[-1]) > max(s.last for s in seen)


def _last_words(log, seen) -> list:
    """Return how a tool failed, or else what a program said last, before what only reports that something failed."""
    errors = [s for s in seen if s.known.kind != "consequence"]
    if not seen or any(s.says == "exception" or s.known.kind != "unknown" for s in errors):
        return []
    report = min(s.numbers[0] for s in seen)
    first = max([0, report - BEFORE, *(n + 1 for n in log.steps if n < report)])
    lines = [(number, log.split(number)[1]) for number in range(first, report)]
    around = (looks.HARMLESS.search, looks.WARNS.match, looks.LAUNCHERS.search, looks.REFERS.search)
    lines = [
        (number, text.strip())
        for number, text in lines
        if text.strip(" -=*") and not (text[:1].isspace() or any(found(text) for found in around))
    ]
    said = next(
        (line for line in lines if looks.PLAIN.search(line[1])), lines[-1] if lines and not errors else None
    )
    if not said:
        return []
    words = Seen([said[0]], said[1], "words", message=[line for line in lines if line[0] > said[0]])
    words.known = unknown(words)
    return [words]


def _findings(log, seen):
    """Yield a `Finding` for all lines that show the same."""
    rows = {}
    for s in seen:
        rows.setdefault(s.known.seen or re.sub(r"\d", "", s.text), []).append(s)
    for some in rows.values():
        some.sort(key=lambda s: s.known.kind == "consequence")  # a wrapper behind what it wraps
        first, kind = some[0], min((s.known.kind for s in some), key=KINDS.index)
        count = sum(len(s.numbers) for s in some)
        place = next((s.trace.place for s in some if s.trace and s.label == first.label), "")
        line = f"{first.label} {first.text}".strip()
        known = replace(with_ranks(log, some), kind=kind)
        yield Finding(known, first.numbers[0] + 1, line, count, place, first.label)


def report(text: str | Log) -> str:
    """Return what a log, `text`, shows: the first cause and what to do, then the rest; or that the run ended well."""
    log = text if isinstance(text, Log) else Log(text)
    if findings := find(log):
        return in_words(findings)
    number, line = log.end
    if not line:
        return "This log is empty: the program wrote nothing, or writes to another file."
    well = "No failure is in this log, nor a word of progress or of an end"
    if log.done or log.steps:
        still = "No failure is in this log: the run ended well, still runs, or was ended from outside"
        well = "This run ended well" if log.done and log.done[-1] >= max(log.steps, default=0) else still
    return f"{well}. Its last line:\n{_shown(number + 1, line)}"


def in_words(findings) -> str:
    """Return findings in words: the first cause and what to do, then the rest."""
    first, *others = findings
    head = (
        "No cause is in this log, only what follows from one:\n"
        if first.known.kind == "consequence"
        else ""
    )
    also = [_shown(other.number, other.line) for other in others[:ALSO]]
    return head + first.paragraph + ("\n\nAlso in this log:\n" + "\n".join(also) if also else "")


def _shown(number, line, place=0) -> str:
    """A line as it is printed: of a long one the part around a place."""
    start = place - 40 if place > LONGEST // 2 and len(line) > LONGEST else 0
    part = line[start : start + LONGEST - 8]
    begin, end = "... " if start else "", " ..." if len(line) > LONGEST else ""
    return f"line {number}: {begin}{part if end else line}{end}"


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
    if state == "cancelled" and (first is None or first.known.kind not in BLAMED):
        return "retry", "it was cancelled"
    if first:
        what, do = first.explained
        return ("retry", what) if first.known.retry else ("fix", do)
    if state in ("failed", "out_of_memory"):
        return "fix", "its log names no known failure: read its last lines"
    return (
        None,
        "it still runs; --live says where its ranks are"
        if state == "running"
        else "no failure is in the log",
    )
