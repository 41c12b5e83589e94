"""The configuration of a throw-away cluster: everything it reads lies in its own folder."""

import contextlib
import os
import socket
from pathlib import Path

import psutil

from mpdemo.errors import UserError

CLUSTER_NAME = "throwaway"
SLURM_CONF = Path(__file__).with_name("slurm.conf")


def write_configuration(cluster, cpus, gpus, memory, wanted):
    """Write slurm.conf, gres.conf, munge's key and the nodes' /etc/hosts; the arguments are those of `Cluster.up`."""
    folder, host, count = cluster.folder, socket.gethostname().split(".")[0], len(cluster.nodes)
    for name in ("state", "log", "spool", "gpu"):
        (folder / name).mkdir()
    for index in range(gpus):  # a GPU needs a device file: Slurm refuses a bare count
        (folder / "gpu" / f"nvidia{index}").symlink_to("/dev/null")
    nodes, kind = f"NodeName=node[1-{count}]", wanted.get("gpu_type")
    gres = f"{nodes} Name=gpu{f' Type={kind}' if kind else ''} File={folder}/gpu/nvidia[0-{gpus - 1}]\n" if gpus else ""
    (folder / "gres.conf").write_text(gres)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    settings = {"name": CLUSTER_NAME, "host": host, "cluster": cluster, "folder": folder}
    settings |= {"user": user_name(), "memory_per_cpu": max(1, memory // cpus)}
    settings |= {"licenses": ",".join(f"{name}:1000" for name in sorted({"seat", *wanted.get("licenses", [])}))}
    text = SLURM_CONF.read_text().format(**settings)
    address = f"NodeHostname={host}" if cluster.network == "none" else f"NodeAddr={cluster.subnet}.[11-{10 + count}]"
    options = [nodes, f"CPUs={cpus}", f"RealMemory={memory}", address]
    options += [f"Port=[{cluster.port + 1}-{cluster.port + count}]"]
    options += [f"Gres=gpu:{f'{kind}:' if kind else ''}{gpus}"] if gpus else []
    options += [f"Feature={','.join(sorted(wanted['features']))}"] if wanted.get("features") else []
    (folder / "slurm.conf").write_text("\n".join([text + " ".join(options), *partition_lines(wanted), ""]))
    # A second name with an "i", or with the site's own suffix: there the nodes are reached over the fast network.
    suffix = wanted.get("suffix") or "i"
    table = ["127.0.0.1 localhost", f"{cluster.controller} {host}"]
    table += [f"{cluster.subnet}.{10 + i} {name} {name}{suffix}" for i, name in enumerate(cluster.nodes, 1)]
    (folder / "hosts").write_text("\n".join(table) + "\n")


def partition_lines(wanted) -> list[str]:
    """Return the partitions as slurm.conf describes them, the default one first."""
    default = wanted.get("default", "debug")
    limit = f"MaxTime={wanted['max_time']}" if wanted.get("max_time") else "MaxTime=INFINITE DefaultTime=10"
    names = [f"{default} Default=YES", *sorted(set(wanted.get("partitions", [])) - {default})]
    lines = [f"PartitionName={name} Nodes=ALL {limit} State=UP" for name in names]
    return lines + [f"PartitionName={name} Nodes=ALL PriorityTier=9 State=UP" for name in wanted.get("urgent", [])]


def first_free_port(count) -> int:
    """Return the first of `count` free ports in a row, below the range that outgoing connections use."""
    for attempt in range(100):
        first = 20_000 + (os.getpid() * 37 + attempt * 131) % 10_000
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("", port))
            return first
    raise UserError(f"no {count} free ports in a row from 20000 to 30000; do: end what listens there, or fewer nodes")


def user_name() -> str:
    """Return this process's user; the environment may still name another one."""
    return psutil.Process().username()
