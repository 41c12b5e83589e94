"""The processes of a throw-away cluster: its daemons, Slurm's commands for it, and their end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time

import psutil

from mpdemo.cluster.config import CLUSTER_NAME
from mpdemo.errors import UserError
from mpdemo.world.processes import child_environment, end_processes, first_child, is_running, start_time

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")
SYSTEM_FOLDERS = ":/usr/sbin:/sbin"  # not on an ordinary user's PATH
# Names of Slurm's processes that outlive their cluster: srun and salloc wait on for one that is gone.
STRAYS = ("slurmstepd", "slurmd", "slurm_script", "srun", "salloc")


def missing_programs(names) -> list[str]:
    """Return those programs that are not installed here."""
    path = os.environ.get("PATH", "") + SYSTEM_FOLDERS
    return [name for name in names if not shutil.which(name, path=path)]


def check_programs():
    """Raise `UserError` with the one line that installs what is missing."""
    if missing := missing_programs(PROGRAMS):
        raise UserError(
            f"no throw-away cluster without {', '.join(missing)}; do (Debian, Ubuntu): "
            "apt-get install slurm-wlm munge iproute2"
        )


class Daemons:
    """The daemons of one cluster, by name; the cluster's state records them.

    Parameters
    ----------
    state : mpdemo.cluster.state.State
    """

    def __init__(self, state):
        self.state = state
        self.slurm_conf, self.log = str(state.folder / "slurm.conf"), state.folder / "log"
        own = child_environment()  # without what an enclosing Slurm job set
        self.environment = own | {"PATH": own["PATH"] + SYSTEM_FOLDERS, "SLURM_CONF": self.slurm_conf}

    def start(self, name, command) -> int:
        """Start a daemon in the background; return its process number."""
        prefix = ["setpriv", "--pdeathsig", "KILL"] if self.state.owned and shutil.which("setpriv") else []
        with open(self.log / f"{name}.stderr", "ab") as log:
            process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd="/",
                start_new_session=True,
            )
        self.state.processes[name] = (process.pid, start_time(process.pid))
        self.state.save()
        return process.pid

    def client(self, *command, seconds=30) -> subprocess.CompletedProcess:
        """Run one of Slurm's commands on this cluster; `UserError` where it has not ended after some seconds."""
        try:
            return subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=seconds)
        except subprocess.TimeoutExpired:
            line = f"{command[0]} took over {seconds} s on the cluster in {self.state.folder}"
            raise UserError(f"{line}; do: another TMPDIR (a faster disk), or fewer nodes") from None

    def wait_for(self, event, ready, seconds=30):
        """Wait until `ready()` is true; `UserError` with a daemon's last output if one ends or `seconds` pass."""
        end = time.monotonic() + seconds
        while not ready():
            ended = [name for name, (pid, started) in self.state.processes.items() if not is_running(pid, started)]
            if ended or time.monotonic() > end:
                name = ended[0] if ended else "slurmctld"
                raise UserError(
                    f"the cluster in {self.state.folder} did not start: no {event} after {seconds} s or {name} ended; "
                    f"its last output: {self._last_output(name)}"
                )
            time.sleep(0.02)

    def _last_output(self, name):
        logs = sorted(self.log.glob(f"{name}*"))
        lines = [line for file in logs for line in file.read_text(errors="replace").splitlines()]
        return " | ".join(lines[-3:]) or "(none)"

    def end(self, *names, first_signal=signal.SIGTERM):
        """End daemons and remove them from the state; names without a process are ignored."""
        end_processes([process for name, process in self.state.processes.items() if name in names], first_signal)
        for name in names:
            self.state.processes.pop(name, None)
        self.state.save()

    def end_nodes(self, *names):
        """End nodes as a power cut would: every process on them dies at once."""
        first_signal = signal.SIGKILL
        if self.state.network != "none":
            # The first process inside a namespace takes all others there with it. The `unshare` outside must end by
            # itself, or a zombie is left: SIGCONT does nothing to it.
            first_signal = signal.SIGCONT
            for name, (pid, started) in self.state.processes.items():
                if name in names and is_running(pid, started):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(first_child(pid) or pid, signal.SIGKILL)
        self.end(*names, first_signal=first_signal)

    def end_strays(self):
        """Kill what still runs for this cluster: its jobs' processes and waiting clients."""
        for process in psutil.process_iter(["name", "environ"]):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if self._is_stray(process):
                    process.kill()

    def _is_stray(self, process) -> bool:
        name, environ = process.info["name"], process.info["environ"] or {}  # None: another user's process
        in_job = environ.get("SLURM_CLUSTER_NAME") == CLUSTER_NAME or name in STRAYS
        if in_job and environ.get("SLURM_CONF") == self.slurm_conf:
            return True
        # slurmstepd writes its title over its environment, and has the log of its node open
        return name == "slurmstepd" and any(file.path.startswith(f"{self.log}/") for file in process.open_files())


def port_answers(host, port) -> bool:
    """Whether something listens on a port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0
