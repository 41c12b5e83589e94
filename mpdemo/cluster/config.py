"""The configuration of a throw-away cluster: everything it reads lies in its own folder."""

import contextlib
import os
import socket
from pathlib import Path

import psutil

from mpdemo.errors import UserError

CLUSTER_NAME = "throwaway"
SLURM_CONF = Path(__file__).with_name("slurm.conf")


def write_configuration(cluster, cpus, gpus, memory, urgent):
    """Write slurm.conf, gres.conf, munge's key and the nodes' /etc/hosts; the arguments are those of `Cluster.up`."""
    folder, host, count = cluster.folder, socket.gethostname().split(".")[0], len(cluster.nodes)
    for name in ("state", "log", "spool", "gpu"):
        (folder / name).mkdir()
    for index in range(gpus):  # a GPU needs a device file: Slurm refuses a bare count
        (folder / "gpu" / f"nvidia{index}").symlink_to("/dev/null")
    nodes = f"NodeName=node[1-{count}]"
    gres = f"{nodes} Name=gpu File={folder}/gpu/nvidia[0-{gpus - 1}]\n" if gpus else ""
    (folder / "gres.conf").write_text(gres)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    settings = {"name": CLUSTER_NAME, "host": host, "cluster": cluster, "folder": folder}
    settings |= {"memory_per_cpu": max(1, memory // cpus)}
    settings |= {"user": psutil.Process().username()}  # the environment may still name another one
    text = SLURM_CONF.read_text().format(**settings)
    address = f"NodeHostname={host}" if cluster.network == "none" else f"NodeAddr={cluster.subnet}.[11-{10 + count}]"
    options = [nodes, f"CPUs={cpus}", f"RealMemory={memory}", address]
    options += [f"Port=[{cluster.port + 1}-{cluster.port + count}]"]
    options += [f"Gres=gpu:{gpus}"] if gpus else []
    partitions = ["PartitionName=debug Default=YES Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP"]
    partitions += ["PartitionName=urgent Nodes=ALL PriorityTier=9 State=UP"] if urgent else []
    (folder / "slurm.conf").write_text("\n".join([text + " ".join(options), *partitions, ""]))
    table = ["127.0.0.1 localhost", f"{cluster.controller} {host}"]
    table += [f"{cluster.subnet}.{10 + i} {name}" for i, name in enumerate(cluster.nodes, 1)]
    (folder / "hosts").write_text("\n".join(table) + "\n")


def first_free_port(count) -> int:
    """Return the first of `count` free ports in a row, below the range that outgoing connections use."""
    for attempt in range(100):
        first = 20_000 + (os.getpid() * 37 + attempt * 131) % 10_000
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("", port))
            return first
    raise UserError(f"no {count} free ports in a row from 20000 to 30000; do: end what listens there, or fewer nodes")
