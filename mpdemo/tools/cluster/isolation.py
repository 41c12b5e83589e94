"""How the nodes of a throw-away cluster are isolated from each other on one machine.

Each node is a set of Linux namespaces: host name, ``/etc/hosts``, processes and, as root, a network of its own. Then
mistakes fail as on a real cluster: with one shared network, ``MASTER_ADDR=localhost`` on two nodes passes wrongly.
The network namespace belongs to the node's first process and vanishes with it; only the bridge must be removed.
"""

import contextlib
import os
import shutil
import subprocess

from mpdemo.errors import UserError

PREFIX = "mpdemo"  # of the bridges' names
PATIENCE = 10  # s for one command
UNSHARE = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
ROOTLESS = ["--user", "--map-current-user", "--keep-caps"]


def choose() -> str:
    """Return the most separate form that works here: "namespaces", "hosts" or "none"."""
    root = os.getuid() == 0
    if root and shutil.which("ip") and works(*UNSHARE, "--net", "true"):
        name = f"{PREFIX}t{os.getpid()}"[:15]
        if works("ip", "link", "add", name, "type", "bridge") and works("ip", "link", "del", name):
            return "namespaces"
    return "hosts" if works(*UNSHARE, *([] if root else ROOTLESS), "true") else "none"


def node_command(network, folder, name) -> list[str]:
    """Return the command that becomes the slurmd of node `name`, inside its namespaces."""
    slurmd = ["slurmd", "-D", "-N", name]
    if network == "none":
        return slurmd
    root = os.getuid() == 0
    unshare = UNSHARE + ([] if root else ROOTLESS) + (["--net"] if network == "namespaces" else [])
    # the node starts its daemon only when its network is there (at most 10 s)
    spool = f"{folder}/spool/{name}"
    script = (
        f"mount --bind {folder}/hosts /etc/hosts && hostname {name} && touch {spool}/isolated || exit 1\n"
        f"for i in $(seq 500); do [ -e {spool}/connected ] && break; sleep 0.02; done\n"
        f"exec {'' if root else 'setpriv --ambient-caps -all --inh-caps -all '}{' '.join(slurmd)}"
    )
    return [*unshare, "sh", "-c", script]


def free_bridge() -> tuple[str, str]:
    """Return a name for a bridge and a subnet (10.N.0) that are not in use on this machine."""
    taken = execute("ip", "-4", "-o", "addr") + execute("ip", "-4", "route")
    for offset in range(200):
        number = 30 + (os.getpid() + offset) % 200
        if f" 10.{number}." not in taken and f"\n10.{number}." not in taken:
            return f"{PREFIX}{number}", f"10.{number}.0"
    raise UserError("no free 10.N.0.0/24 network on this machine")


def make_bridge(bridge, subnet):
    """Make the network switch between the nodes; this machine is host 1 on it."""
    execute("ip", "link", "add", bridge, "type", "bridge")
    execute("ip", "addr", "add", f"{subnet}.1/24", "dev", bridge)
    execute("ip", "link", "set", bridge, "up")


def connect(bridge, subnet, index, pid):
    """Lay a cable from the bridge to the network namespace of process `pid` and give it the node's address."""
    cable = f"{bridge}n{index}"
    works("ip", "link", "del", cable)  # of a node that was killed, if the kernel has not removed it yet
    execute("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    execute("ip", "link", "set", cable, "master", bridge, "up")
    for action in (f"addr add {subnet}.{10 + index}/24 dev eth0", "link set eth0 up", "link set lo up"):
        execute("nsenter", f"--net=/proc/{pid}/ns/net", "ip", *action.split())


def slow_down(bridge, index, mbit):
    """Let a node receive at most `mbit` million bits per second from the others."""
    limit = f"tbf rate {mbit}mbit burst 512kb latency 200ms".split()
    if not works("tc", "qdisc", "add", "dev", f"{bridge}n{index}", "root", *limit):
        raise UserError(f"--mbit {mbit}: tc cannot slow a network here; install iproute2, or leave it out")


def execute(*command) -> str:
    """Run a command for some seconds and return its output; a refusal, or no end, becomes one readable line."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise UserError(f"{' '.join(command)}: {said}") from None


def works(*command) -> bool:
    """Whether a command succeeds."""
    with contextlib.suppress(UserError):
        execute(*command)
        return True
    return False
