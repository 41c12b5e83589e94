"""What may be wrong, what it's called, which clues show it, and what a clue costs.

In these texts {r} stands for the rank where the fault is, {n} for its node, and {a} and {b} for the ranks of that node.
"""

import base64
import json
import zlib
from typing import NamedTuple

COST = {  # minutes that a clue takes, and what it is
    "log": (1, "the job's log, its middle left out"),
    "state": (1, "what Slurm says of the job, and how each process ended"),
    "loss": (1, "the mean loss beside last week's"),
    "stacks": (2, "where each rank is now, by faulthandler, twice"),
    "times": (3, "each rank's steps, and the median ms of loading, computing and all-reduce"),
    "losses": (3, "each rank's own loss before the all-reduce"),
    "recorder": (3, "each rank's last collectives, and who comes last to them"),
    "node": (3, "each node's own disk, and its processes"),
    "files": (3, "checkpoints and data"),
    "gpu": (3, "dmesg and nvidia-smi of each node"),
    "order": (4, "the first samples of each rank's epochs, as numbers in the rank's own file"),
    "weights": (5, "the norm of each rank's weights"),
    "diff": (8, "the program's changes since last week"),
}
CODE, NODE = "fix the program, resume", "resubmit without that node"
DATA, ROOM = "repair that rank's data, resume", "make room on that disk, resume"
OLDER, PORT = "resume all ranks from an older checkpoint", "choose another port, resubmit"
NEXT = CODE, DATA, OLDER, NODE, ROOM, PORT, "reset the GPU, resubmit there", "resubmit as it is"
PLACES = {  # what is meant by a place, for those that mean the same
    ("rank 0", "rank 1", "rank 2", "rank 3"): "one process, with its data and its calls",
    (
        "node 1",
        "node 2",
    ): "a machine and its disk, for both of its ranks. If the nodes differ, the one that is wrong",
    ("all ranks",): "what is the same everywhere",
}


class Incident(NamedTuple):
    """The right answer, and what else is worth knowing."""

    page: str  # what the pager says of such a job
    cause: str
    where: tuple  # places that mean the same
    then: str
    why: str = ""
    chain: tuple = ()  # pairs of a clue and what it shows
    evidence: tuple = ()  # clues that show the cause


FAILED, STUCK, ENDED = "has failed", "has made no progress for a while", "has ended"
RANK, HOST, ALL = ("rank {r}",), ("rank {r}", "node {n}"), ("all ranks",)
BOTH = ("node {n}", "rank {a}", "rank {b}")  # of the node
WAIT = "The others wait for a partner that has gone home."
PATIENCE = "It's no deadlock: rank 0 still works. With NCCL, the others' patience ends after 10 minutes."
ALIKE = "After the all-reduce all ranks are alike, and the log's mean names none."
AGAIN = "A requeued job finds the same checkpoint each time. Check the weights before you save them."
NUMBER = "The recorder shows both at the same number. The condition above the broadcast is true on one rank alone."
DRIVER = "On a real node it's mostly in a driver's call, which no signal ends. Here SIGSTOP plays it."
OWN = "Each node read the newest checkpoint on its own disk."
LATE = "A slow all-reduce is usually a late partner."
INCIDENTS = {  # in the order in which numbers draw them
    "early": Incident(STUCK, "uneven data", RANK, DATA, WAIT),
    "alone": Incident(STUCK, "one rank works alone between collectives", RANK, CODE, PATIENCE),
    "straggler": Incident(ENDED, "a slow processor", HOST, NODE, LATE),
    "loader": Incident(ENDED, "slow loading", RANK, DATA),
    "bad_sample": Incident(ENDED, "a bad sample", RANK, DATA, ALIKE),
    "split": Incident(ENDED, "different checkpoints", ("node {n}",), OLDER, OWN),
    "requeue": Incident(FAILED, "a broken checkpoint", ALL, OLDER, AGAIN),
    "swapped": Incident(STUCK, "collectives in a different order", RANK, CODE, NUMBER),
    "same_order": Incident(ENDED, "the same order in every epoch", ALL, CODE),
    "node_dies": Incident(FAILED, "a node was lost", BOTH, NODE),
    "full": Incident(FAILED, "a full disk", BOTH, ROOM),
    "port": Incident(STUCK, "a port in use", HOST, PORT),
    "frozen": Incident(STUCK, "a process that stands still", HOST, NODE, DRIVER),
    "xid31": Incident(FAILED, "a program's illegal memory access", RANK, CODE),
    "xid79": Incident(FAILED, "a GPU that is gone", ("node {n}", "rank {r}"), NODE),
}
# a cause that no incident has, for each page
NEVER = {FAILED: "out of memory", STUCK: "a slow network", ENDED: "too high a learning rate"}
# incident, clue, what the clue shows of it; all clues of an incident together show it beyond doubt
CHAINS = (
    ("early", "stacks", "rank {r} is at the barrier behind the loop, the others are still in it"),
    ("early", "files", "its shard has fewer images, so fewer batches"),
    ("alone", "stacks", "the others wait in the next all-reduce; rank 0 evaluates alone"),
    ("straggler", "times", "rank {r} computes longest, and its all-reduce is the shortest"),
    ("straggler", "recorder", "it comes last to most collectives, so the others wait for it"),
    ("loader", "times", "rank {r} loads longer than the others"),
    ("loader", "files", "its images are 256 x 256, and are scaled down in every step"),
    ("bad_sample", "losses", "one step before all ranks, rank {r} alone has a NaN: the sample is its own"),
    ("split", "weights", "the nodes' ranks have different weights: nothing ever made them equal"),
    (
        "split",
        "losses",
        "right after the start node {n}'s ranks have the higher loss: it resumed an older one",
    ),
    ("requeue", "log", "each start fails in its first step"),
    ("requeue", "files", "the checkpoint of step 40 is full of NaN, and that of step 20 isn't"),
    ("swapped", "stacks", "rank {r} waits in a broadcast, the others in an all-reduce"),
    ("same_order", "order", "each epoch begins with the same samples, on all ranks"),
    ("node_dies", "state", "node {n} is down"),
    ("node_dies", "files", "it was writing a checkpoint: the last whole one is older"),
    ("full", "log", "rank {a} fails while writing, and the others lose their partner"),
    ("full", "node", "node {n}'s disk is full"),
    ("port", "log", "rank 0 can't listen on MASTER_PORT: another process does"),
    ("frozen", "stacks", "rank {r} doesn't even answer the signal"),
    ("frozen", "node", "its process stands still"),
    ("xid31", "state", "rank {r} aborted, the others only lost their partner"),
    ("xid31", "gpu", "Xid 31 is an access to a wrong address, nearly always by the program"),
    ("xid79", "gpu", "Xid 79: the GPU no longer answers on its bus"),
)
# needed in no chain, but they show the cause
ALSO = ("swapped", "recorder"), ("split", "files"), ("node_dies", "log")


def causes_of(kind) -> list:
    """Return the causes that a job with the same page may have."""
    page = INCIDENTS[kind].page
    return sorted({NEVER[page], *(each.cause for each in INCIDENTS.values() if each.page == page)})


def answer_to(kind, rank) -> Incident:
    """Return the right answer to an incident whose fault is at this rank."""
    truth = INCIDENTS[kind]
    chain = [(clue, filled(said, rank)) for of, clue, said in CHAINS if of == kind]
    evidence = {clue for of, clue, *_ in (*CHAINS, *ALSO) if of == kind}
    return truth._replace(
        where=[filled(place, rank) for place in truth.where], chain=chain, evidence=evidence
    )


def filled(text, rank):
    """Return a text with the rank, its node, and the node's two ranks."""
    return text.format(r=rank, n=rank // 2 + 1, a=rank // 2 * 2, b=rank // 2 * 2 + 1)


def seal(incident) -> bytes:
    """Return an incident as bytes that nobody reads by accident."""
    return base64.b85encode(zlib.compress(json.dumps(incident).encode()))


def unseal(sealed) -> dict:
    return json.loads(zlib.decompress(base64.b85decode(sealed)))
