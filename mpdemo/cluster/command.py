"""``python -m mpdemo cluster run``: borrow a throw-away Slurm cluster for one command.

python -m mpdemo cluster run --nodes 4 -- pytest --nbval notebooks/
python -m mpdemo cluster run --site leonardo -- python -m mpdemo rehearse     # of the shape of a real cluster
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from mpdemo.cluster import Cluster
from mpdemo.cluster.shape import shape_of, stand_in, write_site
from mpdemo.errors import UserError
from mpdemo.jobs.site import load_site, wanted_by_sites
from mpdemo.options import count
from mpdemo.world.processes import clean_up_on_signals, end_processes, start_time


def add_arguments(parser):
    """Declare the one form of the command."""
    actions = parser.add_subparsers(required=True, metavar="run")
    run = actions.add_parser("run", help="start a cluster, run a command on it, take it down")
    run.add_argument("--nodes", type=count(1, 64), default=4, help="number of nodes (default 4)")
    run.add_argument("--site", help="take the shape of this site: its partitions, limits, nodes, GPUs, features")
    run.add_argument("--mbit", type=count(1, 100_000), help="slow the network of the nodes (root only)")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")


def main(args) -> int:
    """Run the command on a cluster of its own; return its exit status."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        raise UserError("nothing to run; do: python -m mpdemo cluster run -- COMMAND")
    site = load_site(args.site) if args.site else None
    shape = shape_of(site) if site else {"wanted": wanted_by_sites()}
    clean_up_on_signals()  # which end the `with` block as well
    with Cluster.up(nodes=args.nodes, mbit=args.mbit, **shape) as cluster:
        return run_command(command, variables(cluster, site))


def variables(cluster, site) -> dict:
    """Return the environment of a command on the cluster: Slurm's configuration and, for a site, its stand-in.

    Says on stderr what was started, and which words of the site file nothing here checks.
    """
    said = [f"cluster of {len(cluster.nodes)} nodes in {cluster.folder} (network: {cluster.network})"]
    if cluster.network == "none":
        said.append("node names do not resolve here (unshare is refused): jobs over two nodes cannot meet")
    environ = cluster.environ
    if site:
        local, left_out = stand_in(site, cluster.knows)
        environ = environ | {"MPDEMO_SITE": f"{cluster.folder}/{local.name}.toml"}
        write_site(local, Path(environ["MPDEMO_SITE"]))
        said.append(f"its shape is that of {site.name}; MPDEMO_SITE is a stand-in for the site's file")
        unchecked = [word for word in ("account", "qos") if getattr(site, word)]
        lists = {"accepted with any value": unchecked, "left out (only the site has it)": left_out}
        said += [f"{what}: {', '.join(words)}" for what, words in lists.items() if words]
    print(*said, sep="\n", file=sys.stderr)
    return environ


def run_command(command, environ) -> int:
    """Run a command on the cluster and return its exit status; the command ends when this process does."""
    process = subprocess.Popen(command, env=os.environ | environ)
    started = start_time(process.pid)
    try:
        while process.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C reached the command as well: it decides
                process.wait()
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        end_processes([(process.pid, started)], signal.SIGTERM, 10)
