"""The processes of a throw-away cluster: its daemons, Slurm's commands for it, and their end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mpdemo.errors import UserError
from mpdemo.tools.cluster import isolation
from mpdemo.world.family import children
from mpdemo.world.processes import child_environment, end_processes, is_running, start_time

CLUSTER_NAME = "throwaway"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")
SYSTEM_FOLDERS = ":/usr/sbin:/sbin"  # not on an ordinary user's PATH
# What may outlive a cluster: srun and salloc keep waiting for one that is gone.
STRAYS = ("munged", "slurmctld", "slurmd", "slurmstepd", "slurm_script", "srun", "salloc")


def check_programs():
    """Raise `UserError` with the one line that installs what is missing."""
    path = os.environ.get("PATH", "") + SYSTEM_FOLDERS
    if missing := [name for name in PROGRAMS if not shutil.which(name, path=path)]:
        install = "do (Debian, Ubuntu): apt-get install slurm-wlm munge iproute2"
        raise UserError(f"no throw-away cluster without {', '.join(missing)}; {install}")


@dataclass
class Daemons:
    """The daemons of one cluster and where it lies."""

    folder: Path
    nodes: list[str]
    network: str  # "namespaces", "hosts" or "none"
    port: int  # of the controller; the nodes have the next ones
    bridge: str | None = None  # connects the nodes, if each has a network of its own
    subnet: str = "127.77.0"
    mbit: int | None = None  # million bits per second that a node receives at most
    processes: dict = field(default_factory=dict)  # name -> (number, start time)

    @property
    def controller(self) -> str:
        """The controller's address."""
        return f"{self.subnet}.1" if self.bridge else "127.0.0.1"

    @property
    def environ(self) -> dict:
        """The variables that point Slurm's commands at this cluster."""
        return {"SLURM_CONF": f"{self.folder}/slurm.conf"}

    @property
    def environment(self) -> dict:
        """The environment of the daemons, without what an enclosing Slurm job has set."""
        own = child_environment()
        return own | self.environ | {"PATH": own["PATH"] + SYSTEM_FOLDERS}

    def start(self, name, command):
        """Start a daemon in the background and return its process number."""
        with open(self.folder / "log" / f"{name}.stderr", "ab") as log:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(
                command, **files, env=self.environment, cwd="/", start_new_session=True
            )
        self.processes[name] = (process.pid, start_time(process.pid))
        return process.pid

    def client(self, *command, seconds=30) -> subprocess.CompletedProcess:
        """Run one of Slurm's commands on this cluster; `UserError` if it has not ended after some seconds."""
        try:
            return subprocess.run(
                command, capture_output=True, text=True, env=self.environment, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            line = f"{command[0]} took over {seconds} s on the cluster in {self.folder}"
            raise UserError(f"{line}; do: another TMPDIR (a faster disk), or fewer nodes") from None

    def wait_for(self, event, ready, seconds=30):
        """Wait until `ready()` is true; `UserError` with a daemon's last output if one ends or `seconds` pass."""
        end = time.monotonic() + seconds
        while not ready():
            ended = [name for name, process in list(self.processes.items()) if not is_running(*process)]
            if ended or time.monotonic() > end:
                name = (ended or ["slurmctld"])[0]
                logs = [
                    file.read_text(errors="replace")
                    for file in sorted((self.folder / "log").glob(f"{name}*"))
                ]
                said = " | ".join("".join(logs).splitlines()[-3:]) or "(none)"
                why = f"no {event} after {seconds} s or {name} ended; its last output: {said}"
                raise UserError(f"the cluster in {self.folder} did not start: {why}")
            time.sleep(0.02)

    def end(self, *names, first_signal=signal.SIGTERM):
        """End daemons and forget them; names without a process are ignored."""
        end_processes([self.processes.pop(name) for name in names if name in self.processes], first_signal)

    def kill_node(self, *names):
        """Switch nodes off as a power cut would: every process on them dies at once."""
        if self.network == "none":
            self.end(*names, first_signal=signal.SIGKILL)
            return
        # The first process inside a namespace takes all others there with it. The `unshare` outside must end by
        # itself, or a zombie is left: SIGCONT does nothing to it.
        for pid, started in [self.processes[name] for name in names if name in self.processes]:
            with contextlib.suppress(ProcessLookupError):
                if is_running(pid, started):
                    os.kill(next(iter(children(pid)), pid), signal.SIGKILL)
        self.end(*names, first_signal=signal.SIGCONT)


def sweep(folder, bridge=None):
    """Kill what runs for a cluster, its jobs' processes and waiting clients too; remove its bridge and its folder."""
    killed = []
    for process in psutil.process_iter(["name", "environ"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            # None: another user's process
            name, environ = process.info["name"], process.info["environ"] or {}
            in_job = environ.get("SLURM_CLUSTER_NAME") == CLUSTER_NAME or name in STRAYS
            # slurmstepd writes its title over its environment, and has the log of its node open
            logs = [file.path for file in process.open_files()] if name == "slurmstepd" else []
            own = in_job and environ.get("SLURM_CONF") == f"{folder}/slurm.conf"
            if own or any(path.startswith(f"{folder}/log/") for path in logs):
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=5)
    if bridge:
        isolation.works("ip", "link", "del", bridge)  # the kernel removes the cables of nodes that are gone
    shutil.rmtree(folder, ignore_errors=True)


def listens(host, port) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
