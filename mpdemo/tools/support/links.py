"""What connects the GPUs of a node, and does what a rank or a GPU sends arrive as it was sent?

Each message has numbers that differ by rank and place, and every one is compared: a broken path between two GPUs gives
zeros or old values, and no error. With the IOMMU or PCIe's ACS switched on, direct copies may go astray. Sources:
https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257, and the legend that ``nvidia-smi topo -m`` prints.
"""

import re
import subprocess
from itertools import combinations
from typing import NamedTuple

import torch
import torch.distributed as dist

SIZES = 2**10, 2**16, 2**20, 2**26  # bytes
SPAN = 2**20  # numbers of a rank are below it, so that the sum over all ranks is exact
REMEDY = (
    "NCCL_P2P_DISABLE=1 sends through the node's memory, which is slower; ask the site to switch off the IOMMU "
    "(or iommu=pt) and PCIe's ACS, or to update the driver; until then no result of several GPUs is to be trusted"
)
# from the fastest to the slowest
LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
EXPECT = "expect PCIe's bandwidth at best, a small part of NVLink's, and copies through the node's memory"


class Wrong(NamedTuple):
    """What did not arrive as it was sent."""

    way: str  # "nccl all-reduce"
    size: int  # bytes
    values: int  # how many differ

    def __str__(self):
        return (
            f"{self.way} of {self.size // 1024} KiB: {self.values:,} of {self.size // 4:,} values are wrong"
        )


def pattern(rank, size, device="cpu") -> torch.Tensor:
    """Return whole numbers for a message of so many bytes, which differ by rank and by place."""
    places = torch.arange(size // 4, dtype=torch.int32, device=device)
    return (places * 7919 + (rank + 1) * 104729) % SPAN


def compare(way, received, expected) -> list[Wrong]:
    """Compare all values of a message in host memory, where the CPU looks at what has arrived."""
    values = int((received.cpu() != expected.cpu()).sum())
    return [Wrong(way, 4 * len(expected), values)] if values else []


def between_ranks(world, devices) -> list[Wrong]:
    """Sum a pattern of each rank, and pass one on around the ring, on each device's backend; return what is wrong."""
    wrong, ranks = [], range(world.world_size)
    after, before = (world.rank + 1) % len(ranks), (world.rank - 1) % len(ranks)
    for device in devices:
        name = "gloo" if device.type == "cpu" else "nccl"
        for size in SIZES:
            message = pattern(world.rank, size, device)
            dist.all_reduce(message)
            wrong += compare(f"{name} all-reduce", message, sum(pattern(rank, size) for rank in ranks))
            message = torch.zeros_like(message)
            sends = dist.P2POp(dist.isend, pattern(world.rank, size, device), after)
            receives = dist.P2POp(dist.irecv, message, before)
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()
            wrong += compare(f"{name} message from rank {before}", message, pattern(before, size))
    return wrong


def between_gpus(own, peers) -> list[Wrong]:
    """Copy a pattern from a GPU of this process to others, directly and through the host; return what is wrong."""
    wrong = []
    for size in SIZES:
        expected = pattern(own, size)
        here = expected.to(f"cuda:{own}")
        wrong += compare(f"copy from GPU {own} to the host", here, expected)
        for peer in peers:
            wrong += compare(f"direct copy from GPU {own} to GPU {peer}", here.to(f"cuda:{peer}"), expected)
            through = here.cpu().to(f"cuda:{peer}")
            wrong += compare(f"copy from GPU {own} through the host to GPU {peer}", through, expected)
    return wrong


def topology() -> str:
    """Return what ``nvidia-smi topo -m`` prints; "" where there is none, or no answer within 20 s."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def in_words(table) -> str:
    """Say how the GPUs of a table talk, by the slowest pair; "" if it has fewer than two."""
    text = re.sub(r"\x1b\[[\d;]*m", "", table)
    rows = {int(row[1]): row[2].split() for row in re.finditer(r"(?m)^GPU(\d+)\s+(.*)$", text)}
    order = list(LINKS)
    pairs = [
        (order.index(kind), pair) for pair in combinations(sorted(rows), 2) if (kind := link(rows, pair))
    ]
    if not pairs:
        return ""
    slowest, (first, second) = max(pairs)
    others = "all pairs" if len({kind for kind, _ in pairs}) == 1 else "others are closer"
    what = f"GPUs {first} and {second} talk over {LINKS[order[slowest]]} ({others})"
    return what if slowest == 0 else f"{what}: {EXPECT}"


def link(rows, pair) -> str:
    """Return the kind of a pair's link, a key of `LINKS`; "" for a word that is none."""
    first, second = pair
    columns = sorted(rows)
    word = re.sub(r"\d+$", "", rows[first][columns.index(second)])
    return word if word in LINKS else ""
