"""The incidents: cause, what to do next, and the shortest chain of clues, each with what it must show.

A link of a chain is (clue, test, conclusion). The test is a pattern, or a function of the clue's text and the rank. In
texts {r}, {n}, {a} and {b} stand for the rank, its node, and that node's two ranks.
"""

import base64
import json
import re
import zlib
from dataclasses import dataclass

CODE, NODE = "fix the program, resume", "resubmit without that node"
DATA, ROOM = "repair that rank's data, resume", "make room on that disk, resume"
OLDER, PORT = "resume all ranks from an older checkpoint", "choose another port, resubmit"
NEXT = CODE, DATA, OLDER, NODE, ROOM, PORT, "reset the GPU, resubmit there", "resubmit as it is"
COST = {  # minutes that a clue takes, and what it is
    "log": (1, "the job's log, its middle left out"),
    "state": (1, "what Slurm says of the job, and how each process ended"),
    "loss": (1, "the mean loss beside last week's"),
    "stacks": (2, "where each rank is now, by faulthandler, twice"),
    "explain": (2, "what mpdemo explain says of the log"),
    "times": (3, "each rank's steps, and the median ms of loading, computing and all-reduce"),
    "losses": (3, "each rank's own loss before the all-reduce"),
    "recorder": (3, "each rank's last collectives, and who comes last; leaves the files for torchfrtrace"),
    "node": (3, "each node's own disk, and its processes"),
    "files": (3, "checkpoints and data"),
    "gpu": (3, "dmesg and nvidia-smi of each node"),
    "order": (4, "the first samples of each rank's epochs"),
    "weights": (5, "the norm of each rank's weights"),
    "diff": (8, "the program's changes since last week"),
}


def seal(incident) -> bytes:
    """Return an incident as bytes that nobody reads by accident."""
    return base64.b85encode(zlib.compress(json.dumps(incident).encode()))


def unseal(sealed) -> dict:
    return json.loads(zlib.decompress(base64.b85decode(sealed)))


@dataclass
class Incident:
    """What a fault is called, and how it's found."""

    cause: str
    next: str
    chain: tuple
    why: str = ""
    also: tuple = ()  # further clues that show it


def each(pattern, text, kind=float):
    """Return what a pattern finds at each of the four ranks; an empty list if it finds fewer or more."""
    found = [kind(value) for value in re.findall(pattern, text, re.M)]
    return found if len(found) == 4 else []


def above(values, rank, factor):
    """Whether the rank's value is more than `factor` times each other's."""
    return bool(values) and all(values[rank] > factor * value for i, value in enumerate(values) if i != rank)


def column(name, factor):
    """The rank's number in this column of the times is `factor` times each other's."""
    return lambda text, rank: above(each(rf"^rank .*{name} ([\d.]+|nan)", text), rank, factor)


def slow_computer(text, rank):
    """The rank computes longer than each other, and its own all-reduce is the shortest: the others wait for it."""
    waited, steps = each(r"^rank .*all-reduce ([\d.]+) ms", text), each(r"^rank \d: (\d+) steps", text, int)
    ran = bool(waited and steps) and min(steps) >= 20
    return ran and waited[rank] == min(waited) and column("compute", 1.4)(text, rank)


def latest(text, rank):
    """The rank comes last in most collectives."""
    return above(each(r"in (\d+)%", text), rank, 1.5)


def waits(where):
    """The others wait in a collective of the loop, and the rank's own stack holds `where`."""

    def test(text, rank):
        rows = dict(re.findall(r"^rank (\d): (.*)", text, re.M))  # of the second dump
        waiting = [re.search(r"all_reduce.*(average|train)", row) for i, row in rows.items() if int(i) != rank]
        return all(waiting) and bool(re.search(where, rows[str(rank)]))

    return test


def fewer(text, rank):
    """The rank has the fewest images."""
    found = each(r"train-\d.npz: .*images \((\d+)", text, int)
    return bool(found) and all(found[rank] < number for i, number in enumerate(found) if i != rank)


def first_nan(text, rank):
    """In some step the rank alone has no number."""
    rows = re.findall(r"^step \d+: (.*)", text, re.M)
    return [rank] in [[int(i) for i in re.findall(r"rank (\d) (?:nan|inf)", row)] for row in rows]


def repeated(text, rank):
    """Epochs 0 and 1 begin alike on all ranks."""
    orders = re.findall(r"epoch 0 (\[.*?\]), epoch 1 (\[.*?\])", text)
    return len(orders) == 4 and all(one == other for one, other in orders)


def behind(text, rank):
    """In the first steps the loss of both ranks of the node is above both of the other's."""
    means = each(r"rank \d ([\d.]+|nan)", text.rpartition("mean of the first")[2])
    mine, other = (means[:2], means[2:]) if rank < 2 else (means[2:], means[:2])
    return bool(means) and min(mine) > 1.5 * max(other)


def parted(text, rank):
    """The two ranks of a node have equal weights, and those of the other node have others."""
    norms = each(r"norm\^2 (\S+)", text, str)
    return bool(norms) and norms[0] == norms[1] != norms[2] == norms[3] and "nan" not in norms


INCIDENTS = {
    "early": Incident(
        "uneven data",
        DATA,
        (
            ("stacks", waits("barrier"), "rank {r} is at the barrier behind the loop, the others are still in it"),
            ("files", fewer, "its shard has fewer images, so fewer batches"),
        ),
        "The others wait for a partner that has gone home.",
    ),
    "alone": Incident(
        "one rank works alone between collectives",
        CODE,
        (("stacks", waits("evaluate"), "the others wait in the next all-reduce; rank 0 evaluates alone"),),
        "It's no deadlock: rank 0 still works. With NCCL, the others' patience ends after 10 minutes.",
    ),
    "straggler": Incident(
        "a slow processor",
        NODE,
        (
            ("times", slow_computer, "rank {r} computes longest, and its all-reduce is the shortest"),
            ("recorder", latest, "it comes last to most collectives, so the others wait for it"),
        ),
        "A slow all-reduce is usually a late partner.",
    ),
    "loader": Incident(
        "slow loading",
        DATA,
        (
            ("times", column("load", 4), "rank {r} loads longer than the others"),
            ("files", r"train-{r}\.npz: .*256, 256", "its images are 256 x 256, and are scaled down in every step"),
        ),
    ),
    "bad_sample": Incident(
        "a bad sample",
        DATA,
        (("losses", first_nan, "one step before all ranks, rank {r} alone has a NaN: the sample is its own"),),
        "After the all-reduce all ranks are alike, and the log's mean names none.",
    ),
    "split": Incident(
        "different checkpoints",
        OLDER,
        (
            ("weights", parted, "the nodes' ranks have different weights: nothing ever made them equal"),
            ("losses", behind, "right after the start node {n}'s ranks have the higher loss: it resumed an older one"),
        ),
        "Each node read the newest checkpoint on its own disk.",
    ),
    "requeue": Incident(
        "a broken checkpoint",
        OLDER,
        (
            ("log", r"FloatingPointError: step 41: loss nan", "each start fails in its first step"),
            ("files", r"step040.*weights nan", "the checkpoint of step 40 is full of NaN, and that of step 20 isn't"),
        ),
        "A requeued job finds the same checkpoint each time. Check the weights before you save them.",
    ),
    "swapped": Incident(
        "collectives in a different order",
        CODE,
        (("stacks", waits("^broadcast"), "rank {r} waits in a broadcast, the others in an all-reduce"),),
        "The recorder shows both at the same number. The condition above the broadcast is true on one rank alone.",
        also=("recorder",),
    ),
    "same_order": Incident(
        "the same order in every epoch",
        CODE,
        (("order", repeated, "each epoch begins with the same samples, on all ranks"),),
    ),
    "node_dies": Incident(
        "a node was lost",
        NODE,
        (
            ("state", r"(?s)rank {a}: has ended; rank {b}: has ended.*node{n} (down|\w+\*)", "node {n} is down"),
            ("files", r"node{n}/saving\.tmp", "it was writing a checkpoint: the last whole one is older"),
        ),
    ),
    "full": Incident(
        "a full disk",
        ROOM,
        (
            (
                "log",
                r"{a}: (RuntimeError|OSError): .*(iostream error|unexpected pos|No space left)",
                "rank {a} fails while writing, and the others lose their partner",
            ),
            ("node", r"node {n}: own disk 100% used, 0 MB", "node {n}'s disk is full"),
        ),
    ),
    "port": Incident(
        "a port in use",
        PORT,
        (("log", r"EADDRINUSE", "rank 0 can't listen on MASTER_PORT: another process does"),),
        also=("explain",),
    ),
    "frozen": Incident(
        "a process that stands still",
        NODE,
        (
            ("stacks", waits("no answer: its process is there"), "rank {r} doesn't even answer the signal"),
            ("node", r"rank {r} stopped", "its process stands still (on a real node mostly in a driver's call)"),
        ),
    ),
    "xid31": Incident(
        "a program's illegal memory access",
        CODE,
        (
            ("state", r"rank {r}: exit code -6", "rank {r} aborted, the others only lost their partner"),
            ("gpu", r"Xid .*: 31,", "Xid 31 is an access to a wrong address, nearly always by the program"),
        ),
    ),
    "xid79": Incident(
        "a GPU that is gone",
        NODE,
        (("gpu", r"node {n}, dmesg:\n.*Xid .*: 79,", "Xid 79: the GPU no longer answers on its bus"),),
    ),
}
PAR = {
    "early": 5,
    "alone": 2,
    "straggler": 16,
    "loader": 13,
    "bad_sample": 3,
    "split": 21,
    "requeue": 4,
    "swapped": 2,
    "same_order": 7,
    "node_dies": 6,
    "full": 8,
    "port": 1,
    "frozen": 9,
    "xid31": 4,
    "xid79": 3,
}  # minutes of the best order of questions for such a page
OTHERS = "a slow network", "out of memory", "too high a learning rate", "a slow compiler", "a wrong version of PyTorch"
CAUSES = sorted({*(incident.cause for incident in INCIDENTS.values()), *OTHERS})


def filled(text, rank):
    """Return a text with the rank {r}, its node {n}, and the node's two ranks {a} and {b}."""
    names = {"r": rank, "n": rank // 2 + 1, "a": rank // 2 * 2, "b": rank // 2 * 2 + 1}
    return re.sub(r"\{([rnab])\}", lambda match: str(names[match[1]]), text)


def holds(test, text, rank):
    """Whether a clue's text passes a link's test, if the fault is at this rank (or its node)."""
    return bool(test(text, rank) if callable(test) else re.search(filled(test, rank), text))


def fits(incident, clues, rank):
    """Whether every link of an incident's chain holds for these clues."""
    return all(holds(test, clues[name], rank) for name, test, _ in incident.chain)
