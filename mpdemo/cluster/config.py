"""The configuration of a throw-away cluster: everything it reads lies in its own folder."""

import contextlib
import os
import socket

import psutil

CLUSTER_NAME = "throwaway"
SLURM_CONF = """\
ClusterName={name}
SlurmctldHost={host}({state.controller})
SlurmctldPort={state.port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge

StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt

# any number of processors and any memory; no binding, since the processors are invented
SlurmdParameters=config_overrides
TaskPlugin=task/none
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
GresTypes=gpu
Licenses=seat:1000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# without a default every job takes a whole node's memory
DefMemPerCPU={memory_per_cpu}
EnforcePartLimits=ALL

# quick answers, quick ends
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=2
UnkillableStepTimeout=30
MinJobAge=3600
ReturnToService=2
MailProg=/bin/true
"""


def write_configuration(state, cpus, gpus, memory, wanted):
    """Write slurm.conf, gres.conf, munge's key and the nodes' /etc/hosts.

    Parameters
    ----------
    state : mpdemo.cluster.state.State
    cpus, gpus, memory : int
        Of each node; `memory` in MiB.
    wanted : dict
        ``partitions`` and ``features`` (lists of names) to offer.
    """
    folder, host = state.folder, socket.gethostname().split(".")[0]
    for name in ("state", "log", "spool", "gpu"):
        (folder / name).mkdir()
    for index in range(gpus):  # a GPU needs a device file: Slurm refuses a bare count
        (folder / "gpu" / f"nvidia{index}").symlink_to("/dev/null")
    nodes = f"node[1-{len(state.nodes)}]"
    gres = f"NodeName={nodes} Name=gpu File={folder}/gpu/nvidia[0-{gpus - 1}]\n" if gpus else ""
    (folder / "gres.conf").write_text(gres)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))

    settings = {"name": CLUSTER_NAME, "host": host, "user": user_name(), "state": state, "folder": folder}
    text = SLURM_CONF.format(**settings, memory_per_cpu=max(1, memory // cpus))
    text += f"NodeName={nodes} CPUs={cpus} RealMemory={memory} {node_options(state, host, gpus, wanted)}\n"
    for name in ["debug Default=YES", *sorted(set(wanted.get("partitions", [])) - {"debug"})]:
        text += f"PartitionName={name} Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP\n"
    (folder / "slurm.conf").write_text(text)
    # A second name with an "i": some sites reach the fast network under such a name.
    table = ["127.0.0.1 localhost", f"{state.controller} {host}"]
    table += [f"{state.subnet}.{10 + i} {name} {name}i" for i, name in enumerate(state.nodes, 1)]
    (folder / "hosts").write_text("\n".join(table) + "\n")


def node_options(state, host, gpus, wanted) -> str:
    """Return the addresses, ports, GPUs and features of all nodes, as slurm.conf describes them."""
    count = len(state.nodes)
    address = f"NodeHostname={host}" if state.network == "none" else f"NodeAddr={state.subnet}.[11-{10 + count}]"
    options = [address, f"Port=[{state.port + 1}-{state.port + count}]"]
    options += [f"Gres=gpu:{gpus}"] if gpus else []
    options += [f"Feature={','.join(sorted(wanted['features']))}"] if wanted.get("features") else []
    return " ".join(options)


def user_name() -> str:
    return psutil.Process().username()  # the environment may still name another one


def first_free_port(count) -> int:
    """Return the first of `count` free ports in a row, below the range that outgoing connections use."""
    first = 20_000 + os.getpid() * 37 % 10_000
    while True:
        with contextlib.ExitStack() as sockets:
            try:
                for port in range(first, first + count):
                    sockets.enter_context(socket.socket()).bind(("", port))
                return first
            except OSError:
                first = 20_000 + (first + 131) % 10_000
