"""Who waits for whom in a job that hangs, in one sentence: by the stacks of its ranks, and by flight-recorder dumps.

Taught in notebooks/11_when_it_breaks.ipynb. PyTorch's flight recorder:
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
"""

import contextlib
import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

from mpdemo import paths
from mpdemo.jobs.looks import LIBRARY as NOT_THE_USERS
from mpdemo.ranks.places import WAITING, called_names

LARGEST = 2**26  # bytes of a flight recorder's file


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

    def __str__(self):
        if not self.node:
            return f"rank {self.rank}: its process is gone"
        where = "its stack is not known (no py-spy, and no answer to SIGUSR2: see explain --help)"
        if self.collective is not None:
            where = f"waits in {self.collective}, {self.line}" if self.collective else f"is at {self.line}"
        return f"rank {self.rank} on {self.node}: {where}; {self.cpu:.0%} of a core, {self.mib} MiB"


def place_of(row) -> Place:
    """Return where a rank is, by its frames: the innermost that is the reader's own, and what it called."""
    known = {name: row[name] for name in ("node", "cpu", "mib", "recorder")}
    frames = row["frames"]
    if not frames:
        return Place(row["rank"], **known)
    own = next((depth for depth, frame in enumerate(frames) if not NOT_THE_USERS.search(frame[0])), len(frames) - 1)
    file, line, function = frames[own]
    collective = collective_of(frames[:own]) or next((n for n in called_on(file, line) if n in WAITING - {"sleep"}), "")
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
    """Say in one sentence who waits for whom; and in one word: none, missing, different, same."""
    waiting, others = {}, []
    for place in found:
        if place.collective:
            waiting.setdefault((place.collective, place.line), []).append(place.rank)
        elif place.node:
            others.append(f"rank {place.rank}, which is at {place.line or 'a place that is not known'}")
        else:
            others.append(f"rank {place.rank}, whose process is gone")
    if not waiting:
        return "none", "No rank waits in a collective."
    calls = [
        f"{in_words(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {collective} ({line})"
        for (collective, line), ranks in waiting.items()
    ]
    if others:
        return "missing", f"{' and '.join(calls)} for {'; '.join(others)}."
    if len(waiting) > 1:
        return "different", f"The ranks wait for each other in different collectives: {'; '.join(calls)}."
    return "same", f"No rank is missing: {calls[0]}. It is slow, or the network or a GPU hangs."


def in_words(numbers) -> str:
    """Return ``rank 1`` or ``ranks 0, 1, 4 to 7`` of ordered numbers."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    runs = [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


class Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries alone: a dump may be anybody's."""

    def find_class(self, module, name):
        """Refuse all else."""
        raise pickle.UnpicklingError(f"holds {module}.{name}")


def recorded(files) -> dict:
    """Return the collectives that flight-recorder dumps hold: rank -> the entries of its file, the last one last."""
    entries = {}
    for file in files:
        rank = re.search(r"\d+$", file.name)  # a dump's name ends with it
        if not rank or not file.is_file() or file.stat().st_size > LARGEST:
            continue
        try:
            found = Plain(io.BytesIO(file.read_bytes())).load()["entries"]
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError):
            continue
        entries[int(rank[0])] = [entry for entry in found if not entry.get("is_p2p")]
    return entries


def of_recorder(entries) -> str:
    """Say in one sentence where the ranks part, by their flight recorders; "" if they do not."""
    for group in sorted({str(entry.get("process_group")) for some in entries.values() for entry in some}):
        calls = {
            rank: {e["collective_seq_id"]: e for e in some if str(e.get("process_group")) == group}
            for rank, some in entries.items()
        }
        last = {rank: max(some, default=0) for rank, some in calls.items()}
        for number in range(max(1, min(last.values())), max(last.values()) + 1):
            here = {rank: call_of(some[number]) for rank, some in calls.items() if number in some}
            kinds = {call.partition(" at ")[0] for call in here.values()}
            absent = [rank for rank in sorted(last) if last[rank] < number]
            if absent:
                what = f"collective number {number}, {next(iter(here.values()))}"
                return f"{in_words(sorted(here))} called {what}; {in_words(absent)} never did."
            if len(kinds) > 1:
                each = "; ".join(f"rank {rank} {call}" for rank, call in sorted(here.items()))
                return f"Collective number {number} is not the same on all ranks: {each}."
    return ""


def call_of(entry) -> str:
    """Return name, sizes and place of a recorded collective."""
    own = (f for f in entry.get("frames", ()) if not NOT_THE_USERS.search(f["filename"]))
    frame = next(own, None)
    place = f" at {frame['filename'].replace(f'{paths.root()}/', '')}, line {frame['line']}" if frame else ""
    return f"{entry['profiling_name']} of {entry.get('input_sizes')}{place}"
