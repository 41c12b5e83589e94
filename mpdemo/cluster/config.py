"""The configuration of a throw-away cluster: everything it reads lies in its own folder."""

import contextlib
import os
import pwd
import shutil
import socket
import tempfile
from pathlib import Path

from mpdemo.errors import UserError

STATE_FILE = "cluster.json"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")
SOCKET_PATH_LIMIT = 100  # bytes: the kernel allows 107 for a socket's path


def write_configuration(folder, state, cpus, gpus, memory, wanted):
    """Write slurm.conf, gres.conf, munge's key and the nodes' /etc/hosts; `memory` of a node in MiB."""
    for name in ("state", "log", "spool", "gpu"):
        (folder / name).mkdir()
    for index in range(gpus):  # a GPU needs a device file: Slurm refuses a mere count
        (folder / "gpu" / f"nvidia{index}").symlink_to("/dev/null")
    nodes = f"node[1-{len(state['nodes'])}]"
    gres = f"NodeName={nodes} Name=gpu File={folder}/gpu/nvidia[0-{gpus - 1}]\n" if gpus else ""
    (folder / "gres.conf").write_text(gres)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))

    controller = f"{short_host_name()}({state['controller']})"
    settings = slurm_settings(folder, controller, state["port"], max(1, memory // cpus))
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines.append(node_line(state, nodes, cpus, gpus, memory, wanted.get("features", [])))
    lines.append("PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP")
    for name in sorted(set(wanted.get("partitions", [])) - {"debug"}):
        lines.append(f"PartitionName={name} Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    # A second name with an "i": some sites reach the fast network under such a name.
    table = ["127.0.0.1 localhost", f"{state['controller']} {short_host_name()}"]
    table += [f"{state['subnet']}.{10 + i} {name} {name}i" for i, name in enumerate(state["nodes"], 1)]
    (folder / "hosts").write_text("\n".join(table) + "\n")


def node_line(state, nodes, cpus, gpus, memory, features) -> str:
    """The line of slurm.conf that describes all nodes."""
    count, first = len(state["nodes"]), state["port"] + 1
    address = f"NodeAddr={state['subnet']}.[11-{10 + count}]"
    if state["network"] == "none":
        address = f"NodeHostname={short_host_name()}"
    words = [
        f"NodeName={nodes}",
        address,
        f"Port=[{first}-{first + count - 1}]",
        f"CPUs={cpus}",
        f"RealMemory={memory}",
    ]
    words += [f"Gres=gpu:{gpus}"] if gpus else []
    words += [f"Feature={','.join(sorted(features))}"] if features else []
    return " ".join([*words, "State=UNKNOWN"])


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
        "JobAcctGatherParams": "OverMemoryKill",
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
