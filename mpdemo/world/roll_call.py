"""One row per rank: its node, GPU and cores, what carries its messages and how fast; and what is wrong with that.

    torchrun --standalone --nproc-per-node 2 -m mpdemo env
    srun python -m mpdemo env        # in a batch script, where MASTER_ADDR and MASTER_PORT are exported

What a transport is called is read from NCCL's own log, and gloo's interface from the connections that are open. Every
wait is bounded. Taught in notebooks/00_start_here.ipynb. Source: https://docs.nvidia.com/deeplearning/nccl/user-guide.
"""

import faulthandler
import os
import re
import socket
import tempfile
from itertools import groupby
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist
from tabulate import tabulate

from mpdemo.world import clock
from mpdemo.world.collectives import gather_objects, rest
from mpdemo.world.devices import gpus_here
from mpdemo.world.env import World, process_group, read_launcher

LIMIT = 150  # s, after which the process ends, whatever it waits for
PATIENCE = 60.0  # s for which a rank waits for the others in one message
SMALL, LARGE = "GB/s, 1 MiB", "GB/s, 256 MiB"
SIZES = {SMALL: 2**20, LARGE: 2**28}
REPEATS = 3  # of each message, and one before them that is not counted
BUDGET = 15.0  # s for all messages of a size: on a slow network the large ones are left out
SLOW = 0.125  # GB/s: more than Gigabit Ethernet carries
HEADERS = ("rank", "host", "device", "peers", "cores", "NUMA", "backend", "transport", SMALL, LARGE)


def roll_call() -> list[dict]:
    """Join the world that a launcher started and return the row of each rank; every rank must call this."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    place, gpus = read_launcher(os.environ), torch.cuda.device_count()
    device = torch.device("cuda", place["local_rank"] % gpus) if gpus else torch.device("cpu")
    world = World(**place, device=device, backend="cpu:gloo,cuda:nccl" if gpus else "gloo")
    with tempfile.TemporaryDirectory(prefix="mpdemo-") as folder:
        log = Path(folder, "nccl.txt")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P", "NCCL_DEBUG_FILE": str(log)}
        with process_group(world, PATIENCE):
            row = whereabouts(world)
            if world.world_size > 1:
                ids = [id_ for id_ in gather_objects(row["uuid"]) if id_]
                shared = len(set(ids)) < len(ids)  # NCCL refuses that
                device = torch.device("cpu") if shared else device
                row |= speeds(device, world.world_size)
                row["backend"] = "gloo" if device.type == "cpu" else "nccl"
                row["transport"] = ", ".join(nccl_transports(log) if device.type == "cuda" else interfaces())
            rows = gather_objects(row)
    faulthandler.cancel_dump_traceback_later()
    return rows


def whereabouts(world) -> dict:
    """Return what this process has: GPU and peers, or cores; and how many GPUs its node has for the job."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    nodes = {path.name[4:] for core in cores for path in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")}
    row = {"rank": world.rank, "host": socket.gethostname(), "cores": list(cores), "NUMA": ",".join(sorted(nodes))}
    row |= {"uuid": "", "device": "CPU", "visible": 0, "held": 0}
    if world.device.type == "cuda":
        own, visible = world.device.index, range(torch.cuda.device_count())
        facts = torch.cuda.get_device_properties(own)
        peers = [other for other in visible if other != own and torch.cuda.can_device_access_peer(own, other)]
        row |= {"uuid": str(facts.uuid), "device": f"{own}: {facts.name} {str(facts.uuid)[:8]}"}
        row |= {"peers": ",".join(map(str, peers)), "visible": len(visible)}
    held = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if row["visible"] or gpus_here():  # a throw-away Slurm pretends to have some
        row["held"] = int(held) if held.isdigit() else row["visible"]
    return row


def speeds(device, ranks) -> dict:
    """Return the bus bandwidth of an all-reduce by size, as nccl-tests define it; None where it would take too long."""
    found, per_byte = {}, 0.0
    for name, size in SIZES.items():
        if size * per_byte * (1 + REPEATS) > BUDGET:
            found[name] = None
            continue
        tensor, taken = torch.zeros(size // 4, device=device), []
        for _ in range(1 + REPEATS):
            rest()
            begin = clock.now(device)
            dist.all_reduce(tensor)
            taken.append(clock.now(device) - begin)
        seconds = max(gather_objects(median(taken[1:])))
        per_byte = seconds / size
        found[name] = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    return found


def nccl_transports(log) -> list[str]:
    """Return what NCCL's log names: P2P (NVLink or PCIe), SHM (the node's memory), NET/IB, NET/Socket."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return sorted(set(re.findall(r"Channel .* via ((?:NET/)?\w+)", text)))


def interfaces() -> list[str]:
    """Return the network interfaces of gloo's connections to other ranks, with their speed where the system says it."""
    process, store = psutil.Process(), int(os.environ["MASTER_PORT"])
    listed = getattr(process, "net_connections", None) or process.connections  # its name before psutil 6
    links = [link for link in listed("tcp") if link.raddr and store not in (link.laddr.port, link.raddr.port)]
    own = {link.laddr.ip.removeprefix("::ffff:") for link in links if link.status == psutil.CONN_ESTABLISHED}
    names = {name for name, addresses in psutil.net_if_addrs().items() if own & {a.address for a in addresses}}
    names |= {"lo"} if any(address.startswith("127.") for address in own) else set()
    speed = {name: stats.speed for name, stats in psutil.net_if_stats().items()}
    return [f"{name} ({speed[name] / 1000:g} Gbit/s)" if speed.get(name) else name for name in sorted(names)]


def what_is_wrong(rows) -> list[tuple]:
    """Return pairs: what is wrong with the placement of the ranks, and the remedy."""
    found, hosts = [], {}
    for host, of_host in groupby(sorted(rows, key=lambda row: row["host"]), key=lambda row: row["host"]):
        hosts[host] = list(of_host)
        found += wrong_on_a_node(host, hosts[host])
    large = rows[0].get(LARGE, SLOW)
    sockets = any("NET/Socket" in row.get("transport", "") for row in rows)
    if len(hosts) > 1 and (sockets or large is None or large < SLOW):
        speed = f"{rows[0][LARGE] or rows[0][SMALL]:.3f} GB/s over {rows[0]['transport']}"
        remedy = "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the fast interface (`ip -br address` lists all)"
        found.append((f"the nodes talk over a slow network: {speed}", f"{remedy}; ask the site for its own settings"))
    return found


def wrong_on_a_node(host, rows) -> list[tuple]:
    """Return what is wrong among the ranks of one node."""
    found, ranks = [], ", ".join(str(row["rank"]) for row in rows)
    used = {row["uuid"] for row in rows if row["uuid"]}
    cores = {core for row in rows for core in row["cores"]}
    held = max(row["held"] for row in rows)
    if 0 < len(used) < len(rows):
        what = f"ranks {ranks} on {host} share {len(used)} GPU{'s' * (len(used) > 1)}"
        found.append((what, "one process per GPU: ask for as many GPUs as processes, and take GPU number local_rank"))
    if len(cores) < len(rows):
        what = f"ranks {ranks} on {host} share {len(cores)} core{'s' * (len(cores) > 1)} ({ranges(cores)})"
        found.append((what, 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK", or fewer processes'))
    if len(used) < held and len(used) == len({row["rank"] for row in rows if row["uuid"]}):
        what = f"the job holds {held} GPUs on {host} and uses {len(used)}"
        found.append((what, "start a process per GPU, or ask for fewer; with none in use, is PyTorch built for them?"))
    if len(rows) > 1 and all(row["visible"] == 1 and "SHM" in row.get("transport", "") for row in rows):
        what = f"the GPUs of {host} exchange data through its memory (SHM), since each process sees only its own"
        found.append((what, "--gres=gpu:N for the node instead of --gpus-per-task, or srun --gpu-bind=none"))
    return found


def ranges(numbers) -> str:
    """Write 0, 1, 2, 5 as ``0-2,5``."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def table(rows) -> str:
    """Return the rows as text."""
    shown = [row | {"cores": ranges(row["cores"])} for row in rows]
    shown = [["-" if row.get(name) in (None, "") else row[name] for name in HEADERS] for row in shown]
    return tabulate(shown, HEADERS, floatfmt=".3g", disable_numparse=range(len(HEADERS) - 2))
