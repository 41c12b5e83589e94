"""A real Slurm cluster of one folder, for tests and for rehearsing on a laptop: ``python -m mpdemo cluster``.

Debian's munged, slurmctld and one slurmd a node run from one folder with ports and a key of their own. Nothing is
written to ``/etc``, no service is started, and root is not needed. ``down`` (or the end of a ``with`` block) leaves
nothing behind: each node is a process namespace, so that its end takes every process of every job with it.
"""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

from mpdemo.cluster import nodes as node_network
from mpdemo.cluster.config import (
    STATE_FILE,
    check_programs,
    clean_environment,
    free_ports,
    port_answers,
    prepare_folder,
    user_name,
    write_configuration,
)
from mpdemo.errors import UserError
from mpdemo.world.processes import end_processes, end_strays, start_time


class Cluster:
    """A running throw-away cluster.

    Start one with `Cluster.up`; as a context manager it is taken down at the end of the block.

    Attributes
    ----------
    folder : Path
        Everything the cluster owns: configuration, key, logs, state.
    nodes : list of str
        The node names, ``node1`` ...
    network : str
        ``"namespaces"`` (a network of its own for each node), ``"hosts"`` (own host names, one network) or ``"none"``.
    """

    def __init__(self, folder):
        self.folder = Path(folder).absolute()
        try:
            self._state = json.loads((self.folder / STATE_FILE).read_text())
        except FileNotFoundError:
            raise UserError(f"no cluster in {self.folder}; start one: python -m mpdemo cluster up {folder}") from None

    nodes = property(lambda self: self._state["nodes"])
    network = property(lambda self: self._state["network"])

    @property
    def environ(self) -> dict:
        """The variables that point Slurm's commands at this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @classmethod
    def up(cls, folder=None, *, nodes=4, cpus=96, gpus=4, memory=180_000, wanted=None, network="auto", owned=False):
        """Start a cluster and wait until every node is idle (well under a second, bounded by 30 s).

        Parameters
        ----------
        folder : path, optional
            A new or empty folder; without it, one in the temporary directory.
        nodes, cpus, gpus : int
            Nodes; processors and (pretended) GPUs of each. Neither has to exist.
        memory : int
            Memory of each node that Slurm may hand out, in MiB; it is not enforced.
        wanted : dict, optional
            ``partitions``, ``features`` and ``reservations`` (lists of names) to offer, so that the files written for
            a real site are accepted: see `mpdemo.jobs.site.wanted_by_sites`.
        network : {"auto", "namespaces", "hosts", "none"}
            How separate the nodes are; "auto" takes the first that works here.
        owned : bool
            The daemons end when this process dies, even by ``kill -9``.

        Raises
        ------
        UserError
            The folder is in use or its path too long, a program is missing, or the daemons did not start.
        """
        check_programs()
        node_network.sweep()
        folder = prepare_folder(folder)
        network = node_network.choose() if network == "auto" else network
        names = [f"node{i + 1}" for i in range(nodes)]
        state = {"nodes": names, "network": network, "pids": {}, "bridge": None, "subnet": "127.77.0", "owned": owned}
        if network == "namespaces":
            state["bridge"], state["subnet"] = node_network.free_bridge()
        state["controller"] = f"{state['subnet']}.1" if state["bridge"] else "127.0.0.1"
        state["port"] = free_ports(nodes + 1)
        (folder / STATE_FILE).write_text(json.dumps(state))
        cluster = cls(folder)
        try:
            write_configuration(folder, state, cpus, gpus, memory, wanted or {})
            cluster._start()
            cluster._reserve((wanted or {}).get("reservations", []))
        except BaseException:
            cluster.down()
            raise
        return cluster

    def _start(self):
        """Start munged, then the controller, then the nodes; each is waited for before the next."""
        folder = self.folder
        if self._state["bridge"]:
            node_network.make_bridge(self._state["bridge"], self._state["subnet"], folder)
        socket_path = folder / "munge.sock"
        files = [f"--key-file={folder}/munge.key", f"--socket={socket_path}", f"--pid-file={folder}/munged.pid"]
        files += [f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/munged.seed"]
        self._spawn("munged", ["munged", "-F", "--force", "--num-threads=4", "--group-update-time=-1", *files])
        self._wait("munged", socket_path.exists)
        self._spawn("slurmctld", ["slurmctld", "-D"])
        self._wait("slurmctld", lambda: port_answers(self._state["controller"], self._state["port"]))
        for index, name in enumerate(self.nodes, 1):
            self.start_node(name, index)
        self._wait(f"{len(self.nodes)} idle nodes", lambda: self._node_states() == ["idle"] * len(self.nodes))

    def start_node(self, name, index=None):
        """Start (again) the slurmd of one node, in its namespaces."""
        index = index or self.nodes.index(name) + 1
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        pid = self._spawn(name, node_network.command(self.network, self.folder, name))
        if self._state["bridge"]:
            node_network.connect(self._state["bridge"], self._state["subnet"], index, pid)
        (self.folder / "spool" / name / "connected").touch()

    def kill_node(self, name):
        """Switch a node off as a power cut would: every process on it dies at once."""
        end_processes({name: self._state["pids"].pop(name)}, signal.SIGKILL, inside=self.network != "none")
        (self.folder / "spool" / name / "connected").unlink()
        self._save()

    def stop_controller(self):
        """Take the controller away; running jobs run on."""
        end_processes({"slurmctld": self._state["pids"].pop("slurmctld")}, signal.SIGTERM)
        self._save()

    def start_controller(self):
        """Start the controller again; it finds its jobs in the state folder."""
        self._spawn("slurmctld", ["slurmctld", "-D"])
        self._wait("the controller's answer", lambda: self._client("scontrol", "ping").returncode == 0)

    def down(self):
        """End every process, remove the bridge and the folder. Works on the leftovers of a dead cluster too."""
        pids = self._state["pids"]
        nodes = {name: pid for name, pid in pids.items() if name in self.nodes}
        end_processes(nodes, signal.SIGKILL, inside=self.network != "none")
        end_processes({name: pid for name, pid in pids.items() if name not in nodes}, signal.SIGTERM)
        end_strays(self.environ["SLURM_CONF"])
        if self._state["bridge"]:
            node_network.remove_bridge(self._state["bridge"])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spawn(self, name, command):
        prefix = ["setpriv", "--pdeathsig", "KILL"] if self._state["owned"] and shutil.which("setpriv") else []
        with open(self.folder / "log" / f"{name}.stderr", "ab") as log:
            process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment() | self.environ,
                cwd="/",
                start_new_session=True,
            )
        self._state["pids"][name] = [process.pid, start_time(process.pid)]
        self._save()
        return process.pid

    def _save(self):
        (self.folder / STATE_FILE).write_text(json.dumps(self._state))

    def _client(self, *command):
        env = clean_environment() | self.environ
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=30)

    def _node_states(self):
        return self._client("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").stdout.split()

    def _wait(self, what, ready, seconds=30):
        end = time.monotonic() + seconds
        while not ready():
            dead = [name for name, (pid, born) in self._state["pids"].items() if start_time(pid) != born]
            if dead or time.monotonic() > end:
                name = dead[0] if dead else "slurmctld"
                raise UserError(
                    f"the cluster in {self.folder} did not start: no {what} after {seconds} s or {name} ended; "
                    f"its last words: {self._last_words(name)}"
                )
            time.sleep(0.02)

    def _last_words(self, name):
        text = ""
        for file in (self.folder / "log").glob(f"{name}*"):
            text += file.read_text(errors="replace")
        return " | ".join(text.splitlines()[-3:]) or "(none)"

    def _reserve(self, names):
        # A reservation of a licence alone: the name exists, and no node is kept from anybody.
        for name in names:
            words = [f"ReservationName={name}", "StartTime=now", "Duration=UNLIMITED", "Users=" + user_name()]
            done = self._client("scontrol", "create", "reservation", *words, "Licenses=seat:1", "Flags=ANY_NODES")
            if done.returncode:
                raise UserError(f"the reservation {name} could not be made: {done.stderr.strip()}")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.down()
