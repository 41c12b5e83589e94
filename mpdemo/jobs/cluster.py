"""A real Slurm cluster of one folder, for tests and for rehearsing on a laptop: ``python -m mpdemo cluster``.

Debian's munged, slurmctld and one slurmd a node run from one folder with ports and a key of their own. Nothing is
written to ``/etc``, no service is started, and root is not needed. ``down`` (or the end of a ``with`` block) leaves
nothing behind: each node is a process namespace, so that its end takes every process of every job with it.
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.jobs import nodes as node_network

STATE_FILE = "cluster.json"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")
SOCKET_PATH_LIMIT = 100  # bytes: the kernel allows 107 for a socket's path


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
        (folder / STATE_FILE).write_text(json.dumps(state))
        cluster = cls(folder)
        try:
            cluster._configure(cpus, gpus, memory, wanted or {})
            cluster._start()
            cluster._reserve((wanted or {}).get("reservations", []))
        except BaseException:
            cluster.down()
            raise
        return cluster

    def _configure(self, cpus, gpus, memory, wanted):
        """Write slurm.conf, gres.conf, the key and the nodes' /etc/hosts."""
        for name in ("state", "log", "spool", "gpu"):
            (self.folder / name).mkdir()
        for index in range(gpus):  # a GPU needs a device file: Slurm refuses a mere count
            (self.folder / "gpu" / f"nvidia{index}").symlink_to("/dev/null")
        count, last = len(self.nodes), max(gpus - 1, 0)
        nodes = f"node[1-{count}]"
        gres = f"NodeName={nodes} Name=gpu File={self.folder}/gpu/nvidia[0-{last}]\n" if gpus else ""
        (self.folder / "gres.conf").write_text(gres)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

        self._port = free_ports(count + 1)
        subnet, host = self._state["subnet"], short_host_name()
        controller = f"{subnet}.1" if self._state["bridge"] else "127.0.0.1"
        settings = slurm_settings(self.folder, f"{host}({controller})", self._port, memory // cpus)
        address = f"NodeHostname={host}" if self.network == "none" else f"NodeAddr={subnet}.[11-{10 + count}]"
        features = ",".join(sorted(wanted.get("features", [])))
        node = [f"NodeName={nodes}", address, f"Port=[{self._port + 1}-{self._port + count}]"]
        node += [f"CPUs={cpus}", f"RealMemory={memory}", "State=UNKNOWN"]
        node += [f"Gres=gpu:{gpus}"] * bool(gpus) + [f"Feature={features}"] * bool(features)
        lines = [f"{name}={value}" for name, value in settings.items()] + [" ".join(node)]
        lines += ["PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP"]
        others = sorted(set(wanted.get("partitions", [])) - {"debug"})
        lines += [f"PartitionName={name} Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP" for name in others]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # A second name with an "i": some sites reach the fast network under such a name.
        table = [f"127.0.0.1 localhost\n{controller} {host}"]
        table += [f"{subnet}.{10 + i} {name} {name}i" for i, name in enumerate(self.nodes, 1)]
        (self.folder / "hosts").write_text("\n".join(table) + "\n")

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
        controller = f"{self._state['subnet']}.1" if self._state["bridge"] else "127.0.0.1"
        self._wait("slurmctld", lambda: port_answers(controller, self._port))
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


def slurm_settings(folder, controller, port, memory_per_cpu) -> dict:
    """The settings of slurm.conf that do not speak of nodes; `memory_per_cpu` in MiB."""
    user = user_name()
    return {
        "ClusterName": "throwaway",
        "SlurmctldHost": controller,
        "SlurmctldPort": port,
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={folder}/munge.sock",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",  # no binding: the processors are invented
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=1",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": memory_per_cpu,  # else every job takes a whole node's memory
        "EnforcePartLimits": "ALL",
        "MpiDefault": "none",
        "GresTypes": "gpu",
        "Licenses": "seat:1000",
        "ReturnToService": 2,
        "MailProg": "/bin/true",
        "SlurmdParameters": "config_overrides",  # any number of processors, any memory
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
        "KillWait": 2,
        "MinJobAge": 3600,
        "InactiveLimit": 0,
        "OverTimeLimit": 0,
        "SlurmctldTimeout": 10,
        "SlurmdTimeout": 10,
        "MessageTimeout": 10,
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": f"{folder}/jobcomp.txt",
        "JobRequeue": 1,
        "UnkillableStepTimeout": 30,
    }


def check_programs():
    """Raise `UserError` with the one line that installs what is missing."""
    missing = [name for name in PROGRAMS if not which(name)]
    if missing:
        raise UserError(
            f"no throw-away cluster without {', '.join(missing)}; do (Debian, Ubuntu): "
            "apt-get install slurm-wlm munge iproute2"
        )


def which(program):
    """Find a program, also in the system folders that are not on an ordinary user's PATH."""
    return shutil.which(program, path=search_path())


def search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def clean_environment() -> dict:
    """This process's environment without what an enclosing Slurm job left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "PMI"))}
    return kept | {"PATH": search_path()}


def prepare_folder(folder) -> Path:
    """Make the cluster's folder; refuse one that is in use."""
    folder = Path(folder or tempfile.mkdtemp(prefix="mpdemo-cluster-")).absolute()
    if len(os.fsencode(folder / "munge.sock")) > SOCKET_PATH_LIMIT:
        raise UserError(
            f"the path {folder} is too long for a socket (at most {SOCKET_PATH_LIMIT} bytes); take a shorter one"
        )
    if any(c in str(folder) for c in " \t#,[]%"):
        raise UserError(f"slurm.conf cannot hold the path {str(folder)!r}; take one without blanks and any of #,[]%")
    if (folder / STATE_FILE).exists():
        raise UserError(f"a cluster is already in {folder}; take it down first: python -m mpdemo cluster down {folder}")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # munged insists on a folder that others may pass through
    return folder


def user_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def short_host_name() -> str:
    return socket.gethostname().split(".")[0]


def free_ports(count) -> int:
    """Return the first of `count` free ports in a row, below the range that outgoing connections use."""
    first = 20_000 + os.getpid() * 37 % 10_000
    while True:
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("", port))
                return first
            except OSError:
                first = 20_000 + (first + 131) % 10_000


def port_answers(host, port) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def start_time(pid) -> str | None:
    """When a process started, as the kernel counts; None if there is none. With the pid it names one process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def end_processes(pids, first_signal, seconds=5, inside=False):
    """Signal each process, wait for all, and kill what is left; `pids` maps a name to (pid, start time).

    With `inside`, the signal goes to the first process inside the namespaces: its end is the end of all others there,
    and the waiting `unshare` outside then ends by itself, so that no zombie is left.
    """

    def living():
        return [pid for pid, born in pids.values() if start_time(pid) == born]

    for sign, wait, child in ((first_signal, seconds, inside), (signal.SIGKILL, 2, False)):
        for pid in living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(first_child(pid) or pid if child else pid, sign)
        end = time.monotonic() + wait
        while living() and time.monotonic() < end:
            time.sleep(0.02)
    for pid, _ in pids.values():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def first_child(pid) -> int | None:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return None


def end_strays(slurm_conf):
    """Kill the job steps (and their programs) of the cluster that runs under this configuration file."""
    mark = f"SLURM_CONF={slurm_conf}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name = (entry / "comm").read_text().strip()
            stray = mark in (entry / "environ").read_bytes() and name in ("slurmstepd", "slurmd", "slurm_script")
        except OSError:
            continue
        if stray:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)
