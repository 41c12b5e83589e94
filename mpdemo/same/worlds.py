"""What the watcher noted of a run: of each rank, and of all together."""

import json
import re
from collections import Counter
from pathlib import Path

from mpdemo.errors import UserError


class Rank:
    """What one rank did, by kind of note."""

    def __init__(self, folder, rank):
        file = folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        self.notes = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut
        self.steps = self.of("step")
        texts = (folder / f"{rank}.{name}" for name in ("out", "err"))
        self.out, self.err = (text.read_text(errors="replace") if text.exists() else "" for text in texts)

    def of(self, kind) -> list:
        """Return the notes of a kind."""
        return [note for note in self.notes if note["kind"] == kind]

    def names(self, kind) -> list:
        """Return the names in the notes of a kind."""
        return [note["name"] for note in self.of(kind)]

    def passes(self, loader) -> list:
        """Return the passes over the data of a loader."""
        return [note for note in self.of("pass") if note["loader"] == loader]

    def printed(self) -> list:
        """Return the losses that were printed, as (name, number, half of its last digit)."""
        lines = [line for line in self.out.splitlines() if "\r" not in line and "it/s" not in line]
        pattern = r"(?i)(\w*loss\w*)[\"']?\s*[:=]?\s*(?:tensor\()?([-+]?\d+\.(\d+)(?:e[-+]?\d+)?)"
        found = [match for line in lines for match in re.finditer(pattern, line)]
        return [(name, float(value), 0.6 * 10.0 ** -len(digits)) for name, value, digits in (m.groups() for m in found)]


class World:
    """What the ranks of a run did together."""

    def __init__(self, folder, order, answer):
        self.processes, self.how, self.cut, self.limit = (
            order["processes"],
            answer["how"],
            order["batches"],
            order["limit"],
        )
        self.folder, processes = Path(order["folder"]), order["processes"]
        self.statuses = {int(rank): status for rank, status in answer["statuses"].items()}
        self.ranks = [Rank(folder, rank) for rank in range(processes)]
        meshes = [tuple(rank.names("tensor")[0]) if rank.names("tensor") else (k,) for k, rank in enumerate(self.ranks)]
        self.replicas = [rank for k, rank in enumerate(self.ranks) if k == min(meshes[k])]  # ranks of a mesh share data
        self.steps = self.ranks[0].steps
        loaders = Counter(step["loader"] for step in self.steps if step["optimizer"] == 0)
        self.loader = loaders.most_common(1)[0][0] if loaders else None

    def names(self, kind) -> set:
        """Return the names in all ranks' notes of a kind."""
        return {name for rank in self.ranks for name in rank.names(kind)}

    @property
    def error(self) -> str:
        """The last line of the first failed rank's error output, or an empty text."""
        failed = next((rank for rank, status in self.statuses.items() if status), None)
        if failed is None:
            return ""
        lines = [line for line in self.ranks[failed].err.splitlines() if line.strip() and line[0] not in " ["]
        return lines[-1] if lines else f"exit status {self.statuses[failed]}"

    def batches(self) -> list:
        """Return the batches that all replicas train on together: a list of passes, of batches, of samples."""
        passes = [[note["batches"][: self.cut] for note in rank.passes(self.loader)] for rank in self.replicas]
        return [[sum(parts, []) for parts in zip(*ranks, strict=False)] for ranks in zip(*passes, strict=False)]


def refuse(one):
    """Refuse a script that does not train in one process."""
    kinds = {note["kind"] for rank in one.ranks for note in rank.notes}
    if "spawn" in kinds:
        raise UserError("the script starts its own processes (mp.spawn); let it take RANK from torchrun instead")
    if "pipeline" in kinds:
        raise UserError("the script cuts its model into a pipeline; same compares ranks that hold the same model")
    if one.error:
        raise UserError(f"the script fails with {one.processes} process{'es' * (one.processes > 1)}: {one.error}")
    if not one.steps:
        limit = f" within {one.limit:g} s without news (--timeout)" if one.how == "silent" else ""
        raise UserError(f"no optimizer step seen{limit}; does the script train in the processes that torchrun starts?")
