"""What the watcher noted of a run: of each rank, and of all together."""

import functools
import itertools
import json
import re
from collections import Counter
from pathlib import Path

from mpdemo.errors import UserError, one_line
from mpdemo.tools.same.ends import OF_OTHERS
from mpdemo.tools.same.finding import EQUAL, gap, norm

NAMES = r"\w*(?:loss|accuracy|perplexity|reward|score|error)\w*|(?:\w+_)?(?:acc|ppl|iou|dice|mae|mse|rmse|auc|f1)\b"
KINDS = ("gradients", "averaged", "local", "weights")  # of tensors in a step
LOSS = re.compile(rf"(?i)({NAMES})[\"']?\s*[:=]?\s*(?:tensor\()?([-+]?\d+\.(\d+)(?:e([-+]?\d+))?)")
OF_GPUS = re.compile(r"(?i)cuda|nccl|gpu|device_ids")


class Rank:
    """What one rank did, by kind of note."""

    def __init__(self, folder, rank, status=0):
        files = [folder / f"{rank}.{name}" for name in ("jsonl", "out", "err")]
        texts = [file.read_text(errors="replace") if file.exists() else "" for file in files]
        notes, self.out, self.err = texts
        # the last may be cut
        self.notes = [json.loads(line) for line in notes.splitlines() if line.endswith("}")]
        self.steps, self.number, self.status = self.of("step"), rank, status
        self.shapes = dict(item for note in self.of("start") for item in note["shapes"].items())

    def of(self, kind) -> list:
        """Return the notes of a kind."""
        return [note for note in self.notes if note["kind"] == kind]

    def names(self, kind) -> list:
        return [note["name"] for note in self.of(kind)]

    def first(self, kind) -> str:
        """Return the name in the first note of a kind, or an empty text."""
        return next(iter(self.names(kind)), "")

    def passes(self, loader) -> list:
        """Return the passes over the data of a loader."""
        return [note for note in self.of("pass") if note["loader"] == loader]

    def drawn(self, kind) -> tuple:
        """Return from which states the first step has drawn random numbers of a kind, and how many, by line."""
        states, sizes = {}, Counter()
        for note in (note for note in self.of("drawn") if note["name"] == kind):
            states.setdefault(note["where"], set()).add(note["state"])
            sizes[note["where"]] += note["size"]
        return states, sizes

    def error(self) -> str:
        """Return what an exception said, or the last line of errors that is neither indented nor PyTorch's warning."""
        lines = [line for line in self.err.splitlines() if line.strip() and line[0] not in " ["]
        said = [note["said"] for note in self.of("failed") if note["said"]]
        return [*said, *lines[::-1], f"exit status {self.status}"][0]

    def printed(self) -> list:
        """Return the losses that were printed, as (name, number, half of its last digit)."""
        lines = [line for line in self.out.splitlines() if "\r" not in line and "it/s" not in line]
        found = [match.groups() for line in lines for match in LOSS.finditer(line)]
        return [
            (name, float(value), 0.6 * 10.0 ** (int(exponent or 0) - len(digits)))
            for name, value, digits, exponent in found
        ]


class World:
    """What the ranks of a run did together."""

    def __init__(self, notes, order, answer):
        self.notes, self.order, self.processes = notes, order, order["processes"]
        self.folder = Path(order["folder"])
        self.how, self.statuses = answer["how"], answer["statuses"]
        self.ranks = [Rank(notes, rank, self.statuses.get(rank)) for rank in range(self.processes)]
        # for each rank, those with the same samples: they have parts of its model or of its sequences
        self.shared = [
            sum(map(list, rank.names("shares") + stages(self.ranks, rank.number)), [rank.number])
            for rank in self.ranks
        ]
        self.cut = []  # names of parameters of which a rank has another shape than one process
        self.steps = list(zip(*(rank.steps for rank in self.ranks), strict=False))  # each of all ranks
        loaders = Counter(ranks[0]["loader"] for ranks in self.steps if ranks[0]["optimizer"] == 0)
        self.loader = loaders.most_common(1)[0][0] if loaders else None

    def of(self, kind) -> list:
        """Return the notes of a kind of all ranks."""
        return [note for rank in self.ranks for note in rank.of(kind)]

    def names(self, kind) -> set:
        """Return the names in the notes of a kind of all ranks."""
        return {str(note["name"]) for note in self.of(kind)}

    def __str__(self):
        return f"{self.processes} process{'es' * (self.processes > 1)}"

    @property
    def replicas(self) -> list:
        """The ranks with rows of their own: of those that share theirs, the first."""
        return [
            rank for rank, shared in zip(self.ranks, self.shared, strict=True) if rank.number == min(shared)
        ]

    def leave_out(self, cut):
        """Leave out parameters that the script cuts by hand; its ranks with equal rows have parts of one model."""
        for step in self.of("step"):
            for kind in KINDS:
                step[kind] = {name: row for name, row in step[kind].items() if name not in cut}
            # an optimizer may hold cut copies alone
            step["gradients"] = step["gradients"] or step["averaged"]
        rows = [[step["rows"] for step in rank.steps] for rank in self.ranks]
        self.shared = [[k for k, other in enumerate(rows) if other == own] for own in rows]

    @functools.cached_property
    def failed(self) -> Rank | None:
        """The rank that failed by itself, if one did, else one that lost its partner."""
        found = (rank for rank in self.ranks if rank.status)
        return min(found, key=lambda rank: bool(OF_OTHERS.search(rank.error())), default=None)

    @property
    def error(self) -> str:
        """What a failed rank says, or an empty text."""
        return self.failed.error() if self.failed else ""

    @property
    def error_line(self) -> str:
        """The line of the reader's files in which that rank failed."""
        return next((note["where"] for note in self.failed.of("failed")), "") if self.failed else ""

    @functools.cached_property
    def sums(self) -> list:
        """For each step and each kind of tensor, the sketches of the whole tensors by parameter."""
        return [
            {
                kind: whole([rank[kind] for rank in ranks], [rank["weights"] for rank in ranks])
                for kind in KINDS
            }
            for ranks in self.steps
        ]

    def own(self, k) -> list:
        """Return the gradient that each replica has computed in a step."""
        parts = [[self.ranks[r].steps[k] for r in set(self.shared[one.number])] for one in self.replicas]
        return [whole([r["local"] for r in part], [r["weights"] for r in part]) for part in parts]

    def differing(self, k, kind) -> list:
        """Return the names of which ranks with the same part have other values; one that a rank lacks is zero."""
        found, first, total = [], {}, max(norm(rank[kind]) for rank in self.steps[k])
        for rank in self.steps[k]:
            for name, held in (rank["weights"] | rank[kind]).items():
                row = held if name in rank[kind] else [0.0] * (len(held) - 1) + held[-1:]
                same = first.setdefault((name, row[-1]), row)
                if (
                    gap(row, same) > EQUAL * (max(row[0], same[0]) ** 0.5 + EQUAL * total)
                    and name not in found
                ):
                    found.append(name)
        return found

    def settled(self, k) -> bool:
        """Whether ranks use gradients of their own, and then average the weights: only the weights have to agree."""
        k = min(k, len(self.steps) - 2)
        if k < 0 or not self.differing(k, "gradients") or self.differing(k + 1, "weights"):
            return False
        step = self.steps[k + 1][0]
        return sum(step["calls"].values()) > sum(sum(part["calls"].values()) for part in step["parts"])

    def searched(self, k) -> bool:
        """Whether the optimizer goes back several times in a step, at other weights each time, as LBFGS does."""
        return sum(part["in_step"] for part in self.steps[k][0]["parts"]) > 1

    def line_of(self, k) -> str:
        """Return the line of the last backward pass of a step, or of the step itself."""
        step = self.steps[k][0]
        return step["parts"][-1]["where"] if step["parts"] else step["where"]

    @property
    def kept(self) -> int:
        """The number of steps of which the weights were kept."""
        return min((note["steps"] for note in self.of("kept")), default=0)

    @property
    def has_saved(self) -> bool:
        """Whether it has written a file when a step was made, or begun."""
        return any(note["trained"] for note in self.of("file"))

    @property
    def tied(self) -> list:
        """The names of parameters that are one."""
        return next((note["tied"] for note in self.ranks[0].of("start")[::-1]), [])

    @functools.cached_property
    def untrained(self) -> dict:
        """The sketches of what the models hold besides, after the first step."""
        return whole([note["weights"] for note in self.of("untrained")])

    @functools.cached_property
    def rows(self) -> list:
        """For each step and replica, the rows that entered the model."""
        return [
            [Counter(sum(rank.steps[k]["rows"], [])) for rank in self.replicas]
            for k in range(len(self.steps))
        ]

    @functools.cached_property
    def in_rows(self) -> list:
        """The rows of each step."""
        return [sum(ranks, Counter()) for ranks in self.rows]

    @functools.cached_property
    def in_samples(self) -> list:
        """The samples of each step, where they have numbers."""
        if self.loader is None:
            return []
        parts, passes = self.parts(), self.batches()
        taken = [
            (step["number"] - 1, step["taken"]) for step, *_ in self.steps if step["loader"] == self.loader
        ]
        return [
            Counter(sum(passes[k][max(0, end - parts) : end], [])) for k, end in taken if k < len(passes)
        ]

    def batches(self) -> list:
        """Return the batches that all replicas train on together: a list of passes, of batches, of samples."""
        cut = max([self.order["batches"], *(ranks[0]["taken"] for ranks in self.steps)])
        passes = [[note["batches"][:cut] for note in rank.passes(self.loader)] for rank in self.replicas]
        return [
            [sum(parts, []) for parts in zip(*ranks, strict=False)] for ranks in zip(*passes, strict=False)
        ]

    def parts(self) -> int:
        """Return how many batches a step has."""
        steps = [ranks[0] for ranks in self.steps]
        known = [0, *(step["taken"] for step in steps if step["number"] == steps[0]["number"])]
        drawn = [b - a for a, b in itertools.pairwise(known)]
        return max([1, *(drawn[1:] or drawn)])  # those before the first step may have been skipped


def stages(ranks, number) -> list:
    """Return the model whose stages a rank and others hold, as a list of one, if none has a parameter of another."""
    alike = {}
    for rank in ranks:
        alike.setdefault(frozenset(rank.shapes), []).append(rank.number)
    apart = all(alike) and not any(a & b for a, b in itertools.combinations(alike, 2))
    return [model for model in zip(*alike.values(), strict=False) if apart and number in model]


def whole(ranks, weights=()) -> dict:
    """Return the mean over the replicas of each part of a parameter, summed over its parts, by parameter.

    A gradient that one lacks of those that have the weights is zero.
    """
    parts = {}  # by name and place: what each replica has of it
    for rank in ranks:
        for name, (*row, place) in rank.items():
            parts.setdefault(name, {}).setdefault(place, []).append(row)
    found = {}
    for name, of_name in parts.items():
        means = []
        for place, rows in of_name.items():
            have = sum(name in rank and place in ("", rank[name][-1]) for rank in weights)
            means.append([sum(of) / max(have, len(rows)) for of in zip(*rows, strict=True)])
        found[name] = [*map(sum, zip(*means, strict=True)), ""]
    return found


def refuse(one):
    """Refuse a script that does not train in one process."""
    if one.names("spawn"):
        what = "the script starts its own processes (mp.spawn), and not as many as it is asked to"
        raise UserError(f"{what}; let it take their number from an argument, {{n}}, or RANK from torchrun")
    if one.error:
        hint = "; give --device cpu to compare it on CPU processes" if OF_GPUS.search(one.error) else ""
        place = one.error_line or one.order["command"][0]
        said = f"the script fails with {one} ({place}): {one_line(one.error)}"
        raise UserError(said + hint * (not one.order["device"]))
    if not one.steps and not one.names("backward"):
        limit = f" within {one.order['limit']:g} s without news (--timeout)" if one.how == "silent" else ""
        raise UserError(
            f"no optimizer step seen{limit}; does the script train in the processes that torchrun starts?"
        )
