"""Who waits for whom in a job that hangs, in one sentence, by the stacks of its ranks; and what to do about it.

Taught in notebooks/61_hang.ipynb.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from mpdemo import paths
from mpdemo.ranks.places import WAITING, called_names
from mpdemo.tools.explain.looks import LIBRARY

BUSY = 0.5  # of a core: a rank outside of collectives that takes more computes, one that takes less waits
WAITS_FOR_A_GPU = {"item", "cpu", "tolist", "numpy", "synchronize"}
ADVICE = {  # by the kind of hang: verdict, and why
    "none": (
        None,
        "no rank waits for another: it works, or it waits for something else, at the lines above",
    ),
    "same": ("retry", "cancel it, and submit it on other nodes (--exclude)"),
    "different": (
        "fix",
        "cancel it; every rank must call the same collectives in the same order: look at the lines above",
    ),
    "stopped": (
        "retry",
        "a process is stopped, by SIGSTOP or a debugger: kill -CONT PID on its node lets it continue",
    ),
    "gone": (
        "fix",
        "cancel it; the rank that is gone has failed, or left its loop before the others: the log has its last lines; "
        "give every rank the same number of steps (drop_last=True, or Join)",
    ),
    "works": (
        None,
        "the missing rank still computes, as one that validates or saves alone does: only waiting will show whether it "
        "comes, so ask again in a minute; if it is at the same line then, look at that line",
    ),
    "unseen": (
        None,
        "the place of the missing rank can't be seen: give it py-spy, or a handler of SIGUSR2 (see --help)",
    ),
    "elsewhere": (
        "fix",
        "cancel it; look at the line of the missing rank: it took another branch, or waits there for something else, "
        "such as a file, a lock or a loader's worker",
    ),
}


@dataclass(frozen=True)
class Place:
    """Where a rank is: in which collective it waits ("": in none; None: nothing is known), and at which line."""

    rank: int
    collective: str | None = None
    line: str = ""
    node: str = ""  # "": no node of the job has a process of this rank
    cpu: float = 0.0  # of a core
    mib: int = 0
    recorder: str = ""  # the prefix of the rank's flight-recorder files, if its environment names one
    stopped: bool = False
    pid: int = 0

    def __str__(self):
        if not self.node:
            return f"rank {self.rank}: its process is gone"
        where = "its stack is not known (no py-spy, and no answer to SIGUSR2: see explain --help)"
        if self.stopped:
            where = f"its process {self.pid} is stopped"
        elif self.collective is not None:
            where = f"waits in {self.collective}, {self.line}"
            if not self.collective:
                where = f"is at {self.line}{self.meaning}"
        return f"rank {self.rank} on {self.node}: {where}; {self.cpu:.0%} of a core, {self.mib} MiB"

    @property
    def meaning(self) -> str:
        """What it means that a rank is at a line outside of collectives."""
        file, _, line = self.line.partition(", line ")
        if line and WAITS_FOR_A_GPU & set(called_on(Path(paths.root(), file), int(line.split()[0]))):
            return " (on a GPU it waits there for all work before, collectives too)"
        return " (it computes)" if self.cpu > BUSY else " (it waits for something else)"

    @property
    def kind(self) -> str:
        """Why a rank is in no collective, in a word of `ADVICE`."""
        if not self.node:
            return "gone"
        if self.stopped or self.cpu > BUSY:
            return "stopped" if self.stopped else "works"
        return "unseen" if self.collective is None else "elsewhere"


def place_of(row) -> Place:
    """Return where a rank is, by its frames: the innermost that is the reader's own, and what it called."""
    known = {name: row[name] for name in ("node", "cpu", "mib", "recorder", "stopped", "pid")}
    frames = row["frames"]
    if not frames:
        return Place(row["rank"], **known)
    own = next(
        (depth for depth, frame in enumerate(frames) if not LIBRARY.search(frame[0])), len(frames) - 1
    )
    file, line, function = frames[own]
    collective = collective_of(frames[:own]) or next(
        (n for n in called_on(file, line) if n in WAITING - {"sleep"}), ""
    )
    short = file.replace(f"{paths.root()}/", "")
    return Place(row["rank"], collective, f"{short}, line {line} in {function}", **known)


def collective_of(inner) -> str:
    """Return in which collective a rank waits, by the frames below its own code, the innermost first; "" if in none."""
    called = [name for path, _, name in inner if path.endswith("distributed_c10d.py")]
    if called:
        return called[-1]
    if inner and "torch/distributed/" in inner[0][0]:  # such as a pipeline's schedule
        return inner[0][2]
    in_backward = any(name == "_engine_run_backward" for _, _, name in inner)
    return "the backward pass (which averages gradients)" if in_backward else ""


def called_on(file, line) -> list:
    """Return the names of the functions that a line of a file calls, if it can be read here."""
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        return called_names(Path(file).read_text(encoding="utf-8"), line)
    return []


def sentence(found) -> tuple[str, str]:
    """Say in one sentence who waits for whom; and in one word of `ADVICE` what kind of hang it is."""
    waiting, others = {}, []
    for place in found:
        if place.collective:
            waiting.setdefault((place.collective, place.line), []).append(place.rank)
        else:
            others.append(place)
    if not waiting:
        return "none", "No rank waits in a collective."
    calls = [
        f"{in_words(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {collective} ({line})"
        for (collective, line), ranks in waiting.items()
    ]
    if others:
        kind = next(kind for kind in ADVICE if kind in {place.kind for place in others})
        return kind, f"{' and '.join(calls)} for {'; '.join(map(missing, others))}."
    if len(waiting) > 1:
        return "different", f"The ranks wait for each other in different collectives: {'; '.join(calls)}."
    return "same", f"No rank is missing: {calls[0]}. It is slow, or the network or a GPU hangs."


def missing(place) -> str:
    """Name a rank for which others wait, and where it is."""
    where = f"which is at {place.line or 'a place that is not known'}"
    if place.stopped:
        where = f"whose process {place.pid} on {place.node} is stopped"
    return f"rank {place.rank}, {where if place.node else 'whose process is gone'}"


def in_words(numbers) -> str:
    """Return ``rank 1`` or ``ranks 0, 1, 4 to 7`` of ordered numbers."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    runs = [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"
