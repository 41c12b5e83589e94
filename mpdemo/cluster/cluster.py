"""A real Slurm cluster in one folder, for tests and for rehearsing on a laptop: ``python -m mpdemo cluster``.

Debian's munged, slurmctld and one slurmd per node run from one folder with ports and a key of their own. Nothing is
written to ``/etc``, no service is started, and root is not needed. ``down`` (or the end of a ``with`` block) leaves
nothing behind: each node is a process namespace, so that its end takes every process of every job with it.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from mpdemo.cluster import accounting, isolation
from mpdemo.cluster.config import first_free_port, user_name, write_configuration
from mpdemo.cluster.daemons import Daemons, check_programs, port_answers
from mpdemo.cluster.state import PREFIX, STATE_FILE, State, prepare_folder
from mpdemo.errors import UserError
from mpdemo.world.processes import is_running


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
        self._state = state = State.load(folder)
        self._daemons = Daemons(state)
        self.folder, self.nodes, self.network = state.folder, state.nodes, state.network

    @property
    def environ(self) -> dict:
        """The variables that point Slurm's commands at this cluster."""
        return {"SLURM_CONF": self._daemons.slurm_conf}

    @classmethod
    def up(cls, folder=None, *, nodes=4, cpus=96, gpus=4, memory=180_000, wanted=None, network="auto", mbit=None,
           owned=False):  # fmt: skip
        """Start a cluster and wait until every node is idle (in a second, with accounting in some; bounded).

        Parameters
        ----------
        folder : path, optional
            A new or empty folder; without it, one in the temporary directory.
        nodes, cpus, gpus : int
            Nodes; processors and (pretended) GPUs of each. Neither has to exist.
        memory : int
            Memory per node that Slurm may allocate, in MiB; it is not enforced.
        wanted : dict, optional
            What jobs may ask for, so that the files written for a real site are accepted: names of ``partitions``,
            ``features``, ``reservations`` and ``licenses``; the ``default`` partition ("debug" without it) and the
            ``max_time`` of all; ``urgent`` partitions, whose jobs take nodes from the others'; the ``gpu_type`` of all
            GPUs; the ``suffix`` of the nodes' second names. With
            ``accounts`` or ``qos`` every other one is refused, where the programs for accounting are installed. See
            `mpdemo.cluster.shape.shape_of` for one site, `mpdemo.jobs.site.wanted_by_sites` for all.
        network : {"auto", "namespaces", "hosts", "none"}
            How separate the nodes are; "auto" takes the first that works here.
        mbit : int, optional
            Million bits per second that each node receives at most from the others.
        owned : bool
            The daemons end when this process dies, even by ``kill -9``.

        Raises
        ------
        UserError
            The folder is in use or its path too long, a program is missing, or the daemons did not start.
        """
        check_programs()
        remove_leftovers()
        network = isolation.choose() if network == "auto" else network
        if mbit and network != "namespaces":
            raise UserError(f"--mbit {mbit} needs a network of its own for each node, which takes root, ip and unshare")
        wanted, names = wanted or {}, [f"node{i + 1}" for i in range(nodes)]
        port, bridge = first_free_port(nodes + 2), isolation.free_bridge() if network == "namespaces" else ()
        state = State(prepare_folder(folder), names, network, port, owned, *bridge, mbit=mbit)  # the folder last
        state.save()
        cluster = cls(state.folder)
        try:
            write_configuration(state, cpus, gpus, memory, wanted)
            cluster._start(wanted)
            cluster._reserve(wanted.get("reservations", []))
        except BaseException:
            cluster.down()
            raise
        return cluster

    def _start(self, wanted):
        """Start munged, accounting, the controller, the nodes; each is waited for before the next."""
        if self._state.bridge:
            isolation.make_bridge(self._state.bridge, self._state.subnet, self.folder)
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        files |= {"log-file": "log/munged.log"}
        options = ["--force", "--num-threads=4", "--group-update-time=-1"]
        options += [f"--{option}={self.folder / file}" for option, file in files.items()]
        self._daemons.start("munged", ["munged", "-F", *options])
        self._daemons.wait_for("munged", (self.folder / "munge.sock").exists)
        if (wanted.get("accounts") or wanted.get("qos")) and accounting.available():
            accounting.configure(self._state)
            accounting.start(self._daemons, wanted)
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        self._daemons.wait_for(f"{len(self.nodes)} idle nodes", self._all_idle)

    def start_node(self, name):
        """Start the slurmd of one node, in its namespaces; also of one that was killed."""
        spool, index = self.folder / "spool" / name, self.nodes.index(name) + 1
        spool.mkdir(exist_ok=True)
        (spool / "connected").unlink(missing_ok=True)
        pid = self._daemons.start(name, isolation.node_command(self.network, self.folder, name))
        if self._state.bridge:
            isolation.connect(self._state.bridge, self._state.subnet, index, pid)
        if self._state.mbit:
            isolation.slow_down(self._state.bridge, index, self._state.mbit)
        (spool / "connected").touch()

    def _all_idle(self):
        rows = self._daemons.client("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return set(rows) == {f"{name} idle" for name in self.nodes}

    def knows(self, program, option) -> bool:
        """Return whether one of Slurm's commands has an option here; a site's plugins add more to its own."""
        return "unrecognized option" not in self._daemons.client(program, option, "--version").stderr

    def kill_node(self, name):
        """Switch a node off as a power cut would: every process on it dies at once."""
        self._daemons.end_nodes(name)

    def stop_controller(self):
        """Stop the controller; running jobs run on."""
        self._daemons.end("slurmctld")

    def start_controller(self):
        """Start the controller, for the first time or again: it finds its jobs in the state folder."""
        self._daemons.start("slurmctld", ["slurmctld", "-D"])
        self._daemons.wait_for("slurmctld", lambda: port_answers(self._state.controller, self._state.port))

    def down(self):
        """End every process, remove the bridge and the folder. Works on what is left of a dead cluster too."""
        self._daemons.end_nodes(*self.nodes)
        self._daemons.end("munged", "slurmctld", "slurmdbd", "mariadbd")
        self._daemons.end_strays()
        if self._state.bridge:
            isolation.remove_bridge(self._state.bridge)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _reserve(self, names):
        # A reservation of a licence alone: the name exists, and no node is kept from anybody.
        for name in names:
            options = [f"ReservationName={name}", "StartTime=now", "Duration=UNLIMITED", f"Users={user_name()}"]
            options += ["Licenses=seat:1", "Flags=ANY_NODES"]
            done = self._daemons.client("scontrol", "create", "reservation", *options)
            if done.returncode:
                raise UserError(f"the reservation {name} could not be made: {done.stderr.strip()}")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.down()


def remove_leftovers():
    """Take down what is left in the temporary directory of this user's clusters that ended with a killed owner."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{STATE_FILE}"):
        with contextlib.suppress(UserError, OSError):
            state, own = State.load(file.parent), file.stat().st_uid == os.getuid()
            ended = state.processes and not any(is_running(*process) for process in state.processes.values())
            if own and state.owned and ended:
                Cluster(file.parent).down()
    isolation.remove_leftover_bridges()
