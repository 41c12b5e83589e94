"""One row per rank: its node, GPU and cores, what carries its messages and whether they arrive; and what is wrong.

    torchrun --standalone --nproc-per-node 2 -m mpdemo env
    srun python -m mpdemo env        # in a batch script, where MASTER_ADDR and MASTER_PORT are exported

NCCL's own log names its transports, the open connections name gloo's interface. Every wait is bounded.
Source: https://docs.nvidia.com/deeplearning/nccl/user-guide.
"""

import os
import re
import socket
import tempfile
from itertools import groupby
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from tabulate import tabulate

from mpdemo.tools.support import links
from mpdemo.world.collectives import gather_objects
from mpdemo.world.devices import gpus_here
from mpdemo.world.env import World, process_group, read_launcher

PATIENCE = 60.0  # s for which a rank waits for the others in one message
HEADERS = ("rank", "host", "device", "peers", "cores", "backend", "transport")


def roll_call() -> list[dict] | None:
    """Join the world that a launcher started; return the row of each rank, in rank 0. Every rank must call this."""
    place, gpus = read_launcher(os.environ), torch.cuda.device_count()
    device = torch.device("cuda", place["local_rank"] % gpus) if gpus else torch.device("cpu")
    nccl = gpus > 0 and dist.is_nccl_available()
    world = World(**place, device=device, backend="cpu:gloo,cuda:nccl" if nccl else "gloo")
    with tempfile.TemporaryDirectory(prefix="mpdemo-") as folder:
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P",
            "NCCL_DEBUG_FILE": f"{folder}/nccl",
        }
        with process_group(world, PATIENCE):
            row = whereabouts(world)
            if world.world_size > 1:
                ids = list(filter(None, gather_objects(row["uuid"])))
                nccl = nccl and len(set(ids)) == len(ids)  # it refuses two ranks on one GPU
                # the first message of NCCL connects the ranks, and its log then says how
                devices = [torch.device("cpu"), device][: 1 + nccl]
                row["wrong"] += map(str, links.between_ranks(world, devices))
                row["backend"] = "nccl" if nccl else "gloo"
                row["transport"] = ", ".join(
                    nccl_transports(Path(folder, "nccl")) if nccl else interfaces()
                )
            rows = gather_objects(row)
    return rows if world.rank == 0 else None


def whereabouts(world) -> dict:
    """Return what this process has: GPU and peers, or cores; and how many GPUs its node has for the job."""
    cores = sorted(os.sched_getaffinity(0))
    row = {"rank": world.rank, "host": socket.gethostname(), "cores": cores}
    row |= {"uuid": "", "device": "CPU", "visible": torch.cuda.device_count(), "held": 0}
    row |= {
        "wrong": [],
        "topology": links.in_words(links.topology()) if world.local_rank == 0 else "",
    }
    if row["visible"]:
        own = world.device.index
        facts = torch.cuda.get_device_properties(own)
        peers = [n for n in range(row["visible"]) if n != own and torch.cuda.can_device_access_peer(own, n)]
        row |= {"uuid": str(facts.uuid), "device": f"{own}: {facts.name} {str(facts.uuid)[:8]}"}
        row["peers"] = ",".join(map(str, peers))
        row["wrong"] += map(str, links.between_gpus(own, peers))
    # elsewhere nothing is held: others may use what this job leaves
    in_slurm = "SLURM_JOB_ID" in os.environ
    if in_slurm and (row["visible"] or gpus_here()):  # a throw-away Slurm only pretends to have some
        row["held"] = int(os.environ.get("SLURM_GPUS_ON_NODE") or row["visible"])
    return row


def nccl_transports(log) -> list[str]:
    """Return what NCCL's log names: P2P (NVLink or PCIe), SHM (the node's memory), NET/IB, NET/Socket."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return sorted(set(re.findall(r"Channel .* via ((?:NET/)?\w+)", text)))


def interfaces() -> list[str]:
    """Return the network interfaces of gloo's open connections to other ranks."""
    process, store = psutil.Process(), int(os.environ["MASTER_PORT"])
    links = [link for link in process.net_connections("tcp") if link.status == psutil.CONN_ESTABLISHED]
    own = {
        link.laddr.ip.removeprefix("::ffff:")
        for link in links
        if store not in (link.laddr.port, link.raddr.port)
    }
    own |= {"127.0.0.1"} if any(address.startswith("127.") for address in own) else set()
    return sorted(
        name for name, cards in psutil.net_if_addrs().items() if own & {card.address for card in cards}
    )


def what_is_wrong(rows, whole_nodes=False) -> list[tuple]:
    """Return pairs: what is wrong with the placement of the ranks, and the remedy; `whole_nodes` may have GPUs left."""
    by_host = groupby(sorted(rows, key=lambda row: row["host"]), key=lambda row: row["host"])
    found = [wrong_on_a_node(host, list(of_host), whole_nodes) for host, of_host in by_host]
    if len(found) > 1 and any("NET/Socket" in row.get("transport", "") for row in rows):
        what = "NCCL uses TCP between the nodes (NET/Socket), which is slower than InfiniBand and the like"
        remedy = "ask the site for its settings; NCCL_SOCKET_IFNAME names an interface (`ip -br address` lists all)"
        found.append([(what, remedy)])
    return sum(found, [])


def wrong_on_a_node(host, rows, whole_nodes=False) -> list[tuple]:
    """Return what is wrong among the ranks of one node; see `what_is_wrong`."""
    found = [
        (f"rank {row['rank']} on {host}: {wrong}", links.REMEDY)
        for row in rows
        for wrong in row.get("wrong", ())
    ]
    ranks = f"ranks {', '.join(str(row['rank']) for row in rows)} on {host} share"
    used, held = {row["uuid"] for row in rows} - {""}, max(row["held"] for row in rows)
    cores, count = {core for row in rows for core in row["cores"]}, len(rows)
    if 0 < len(used) < count:
        found.append(
            (f"{ranks} {len(used)} GPU(s)", "ask for a GPU per rank; each takes number local_rank")
        )
    if len(cores) < count:
        found.append(
            (f"{ranks} {len(cores)} core(s): {ranges(cores)}", "srun --cpus-per-task=N, or fewer ranks")
        )
    if len(used) < held and len(used) in ((0,) if whole_nodes else (0, count)):
        remedy = "start a rank per GPU, or ask for fewer; if none is used: is this PyTorch built for them?"
        found.append((f"the job holds {held} GPUs on {host} and uses {len(used)}", remedy))
    if count > 1 and all(row["visible"] == 1 and "SHM" in row.get("transport", "") for row in rows):
        what = (
            f"the GPUs of {host} exchange data through its memory (SHM), since each rank sees only its own"
        )
        found.append(
            (what, "--gres=gpu:N for the node instead of --gpus-per-task, or srun --gpu-bind=none")
        )
    return found


def ranges(numbers) -> str:
    """Write 0, 1, 2, 5 as ``0-2,5``."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def table(rows) -> str:
    """Return the rows as text."""
    rows = [row | {"cores": ranges(row["cores"])} for row in rows]
    cells = [["-" if row.get(name) in (None, "") else row[name] for name in HEADERS] for row in rows]
    return tabulate(cells, HEADERS, disable_numparse=True)
