"""A real Slurm cluster in one folder, for tests and for rehearsing on a laptop: ``mpdemo cluster``.

Debian's munged, slurmctld and one slurmd per node run from one folder with ports and a key of their own. Nothing is
written to ``/etc``, no service is started, and root is not needed. Each node is a process namespace, so that its end
takes every process of every job with it. Accounting is off: Slurm takes any account and any qos.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.tools.cluster import isolation
from mpdemo.tools.cluster.daemons import CLUSTER_NAME, Daemons, check_programs, listens, sweep

SLURM_CONF = Path(__file__).with_name("slurm.conf")
SOCKET_PATH_LIMIT = 100  # bytes: the kernel allows 107 for a socket's path
SWEEP = "import sys; from mpdemo.tools.cluster.daemons import sweep; sweep(*sys.argv[1:])"


class Cluster(Daemons):
    """A running throw-away cluster: start one with `Cluster.up`, best in a ``with`` block, which takes it down.

    It is also taken down when the process that started it dies, even by ``kill -9``.
    """

    guard = None

    @classmethod
    def up(cls, *, nodes=4, cpus=96, gpus=4, memory=180_000, urgent=False, network=None, mbit=None):
        """Start a cluster and wait until every node is idle (about a second; bounded).

        `cpus`, `gpus` and `memory` (MiB) of a node are invented; jobs of the `urgent` partition take the others' nodes.
        `network` is "namespaces", "hosts" or "none", by default the first that works here; `mbit` slows it down.
        """
        check_programs()
        network = network or isolation.choose()
        if mbit and network != "namespaces":
            raise UserError(
                f"--mbit {mbit} needs a network of its own for each node, which takes root, ip and unshare"
            )
        port = first_free_port(nodes + 1)
        bridge = isolation.free_bridge() if network == "namespaces" else ()
        names = [f"node{i + 1}" for i in range(nodes)]
        cluster = cls(new_folder(), names, network, port, *bridge, mbit=mbit)  # the folder last
        try:
            cluster.guard = guard(cluster.folder, *bridge[:1])
            write_configuration(cluster, cpus, gpus, memory, urgent)
            cluster._start_all()
        except BaseException:
            cluster.down()
            raise
        return cluster

    def _start_all(self):
        """Start munged, the controller, the nodes; each is waited for before the next."""
        if self.bridge:
            isolation.make_bridge(self.bridge, self.subnet)
        files = {"key": "munge.key", "pid": "munged.pid", "seed": "munged.seed", "log": "log/munged.log"}
        options = [f"--{option}-file={self.folder / file}" for option, file in files.items()]
        options += [
            f"--socket={self.folder}/munge.sock",
            "--force",
            "--num-threads=4",
            "--group-update-time=-1",
        ]
        self.start("munged", ["munged", "-F", *options])
        self.wait_for("munged", (self.folder / "munge.sock").exists)
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        idle = {f"{name} idle" for name in self.nodes}
        self.wait_for(
            "idle nodes", lambda: idle == set(self.client("sinfo", "-hNo", "%N %T").stdout.splitlines())
        )

    def start_node(self, name):
        """Start the slurmd of one node, in its namespaces; also of one that was killed."""
        spool, index = self.folder / "spool" / name, self.nodes.index(name) + 1
        spool.mkdir(exist_ok=True)
        for mark in ("isolated", "connected"):  # of a node that was killed
            (spool / mark).unlink(missing_ok=True)
        pid = self.start(name, isolation.node_command(self.network, self.folder, name))
        if self.bridge:
            self.wait_for(f"network of {name}", (spool / "isolated").exists)
            isolation.connect(self.bridge, self.subnet, index, pid)
        if self.mbit:
            isolation.slow_down(self.bridge, index, self.mbit)
        (spool / "connected").touch()

    def start_controller(self):
        """Start the controller, for the first time or again: it finds its jobs in the state folder."""
        self.start("slurmctld", ["slurmctld", "-D"])
        self.wait_for("slurmctld", lambda: listens(self.controller, self.port))

    def down(self):
        """End every process, remove the bridge and the folder."""
        self.kill_node(*self.nodes)
        self.end("munged", "slurmctld", first_signal=signal.SIGKILL)
        sweep(self.folder, self.bridge)
        if self.guard:
            self.guard.kill()
            self.guard.communicate()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.down()


def guard(*what) -> subprocess.Popen:
    """Start a shell that sweeps a cluster away at the end of file of its input: when this process is gone."""
    words = ["sh", "-c", 'read _; exec "$@"', "guard", sys.executable, "-c", SWEEP, *map(str, what)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, **silent, cwd=paths.source(), start_new_session=True
    )


def new_folder() -> Path:
    """Make the cluster's folder, where a socket can lie and slurm.conf can name it."""
    folder = Path(tempfile.mkdtemp(prefix="mpdemo-cluster-")).absolute()
    if len(os.fsencode(folder / "munge.sock")) > SOCKET_PATH_LIMIT or any(
        c in str(folder) for c in " \t#,[]%"
    ):
        folder.rmdir()
        allowed = f"at most {SOCKET_PATH_LIMIT} bytes, without blanks and any of #,[]%"
        raise UserError(f"Slurm cannot work in {folder} ({allowed}); do: another TMPDIR")
    folder.chmod(0o755)  # munged insists on a folder that others may pass through
    return folder


def write_configuration(cluster, cpus, gpus, memory, urgent):
    """Write slurm.conf, gres.conf, munge's key and the nodes' /etc/hosts; the arguments are those of `Cluster.up`."""
    folder, subnet, count = cluster.folder, cluster.subnet, len(cluster.nodes)
    for name in ("state", "log", "spool", "gpu"):
        (folder / name).mkdir()
    for index in range(gpus):  # a GPU needs a device file: Slurm refuses a bare count
        (folder / "gpu" / f"nvidia{index}").symlink_to("/dev/null")
    gres = f"NodeName=node[1-{count}] Name=gpu File={folder}/gpu/nvidia[0-{gpus - 1}]\n" if gpus else ""
    (folder / "gres.conf").write_text(gres)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    host = socket.gethostname().split(".")[0]
    address = (
        f"NodeHostname={host}" if cluster.network == "none" else f"NodeAddr={subnet}.[11-{10 + count}]"
    )
    text = SLURM_CONF.read_text().format(
        name=CLUSTER_NAME,
        host=host,
        cluster=cluster,
        folder=folder,
        user=psutil.Process().username(),  # the environment may still name another one
        memory_per_cpu=max(1, memory // cpus),
        node=f"CPUs={cpus} RealMemory={memory} {address} {f'Gres=gpu:{gpus}' if gpus else ''}",
        count=count,
        ports=f"{cluster.port + 1}-{cluster.port + count}",
    )
    urgent_partition = "PartitionName=urgent Nodes=ALL PriorityTier=9 State=UP\n" if urgent else ""
    (folder / "slurm.conf").write_text(text + urgent_partition)
    table = ["127.0.0.1 localhost", f"{cluster.controller} {host}"]
    table += [f"{subnet}.{10 + i} {name}" for i, name in enumerate(cluster.nodes, 1)]
    (folder / "hosts").write_text("\n".join(table) + "\n")


def first_free_port(count) -> int:
    """Return the first of `count` free ports in a row, below the range that outgoing connections use."""
    for attempt in range(100):
        first = 20_000 + (os.getpid() * 37 + attempt * 131) % 10_000
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("", port))
            return first
    raise UserError(
        f"no {count} free ports in a row from 20000 to 30000; do: end what listens there, or fewer nodes"
    )
