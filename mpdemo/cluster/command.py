"""``python -m mpdemo cluster up|down|run``: start, stop, or borrow a throw-away Slurm cluster.

python -m mpdemo cluster up FOLDER --nodes 2     # prints the line that points Slurm's commands at it
python -m mpdemo cluster down FOLDER
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
from mpdemo.world.processes import clean_up_on_signals, end_processes, start_time


def add_arguments(parser):
    """Declare the three forms of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="up|down|run")
    up = actions.add_parser("up", help="start a cluster in a folder and leave it running")
    up.add_argument("folder", nargs="?", help="a new folder (default: one in the temporary directory)")
    down = actions.add_parser("down", help="stop a cluster and remove its folder")
    down.add_argument("folder")
    run = actions.add_parser("run", help="start a cluster, run a command on it, take it down")
    for sub in (up, run):
        sub.add_argument("--nodes", type=count(1, 64), default=4, help="number of nodes (default 4)")
        sub.add_argument("--site", help="take the shape of this site: its partitions, limits, nodes, GPUs, features")
        sub.add_argument("--cpus", type=count(1, 4096), help="processors of each node, invented (the site's, else 96)")
        sub.add_argument("--gpus", type=count(0, 64), help="GPUs of each node, invented (the site's, else 4)")
        sub.add_argument("--network", choices=["auto", "namespaces", "hosts", "none"], default="auto")
        sub.add_argument("--mbit", type=count(1, 100_000), help="slow the network of the nodes (root only)")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")


def count(low, high):
    """Return a converter for argparse that takes whole numbers from `low` to `high`."""

    def convert(text):
        if text.isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")

    return convert


def main(args) -> int:
    """Run one form of the command; return its exit status (for ``run``, the command's own)."""
    if args.action == "down":
        Cluster.load(args.folder).down()
        return 0
    site = load_site(args.site) if args.site else None
    options = shape_of(site) if site else {"wanted": wanted_by_sites()}
    given = {name: getattr(args, name) for name in ("nodes", "cpus", "gpus", "network", "mbit")}
    options |= {name: value for name, value in given.items() if value is not None}
    if args.action == "up":
        for name, value in variables(Cluster.up(args.folder, **options), site).items():
            print(f"export {name}={value}")
        return 0
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        raise UserError("nothing to run; do: python -m mpdemo cluster run -- COMMAND")
    clean_up_on_signals()  # which end the `with` block as well
    with Cluster.up(owned=True, **options) as cluster:
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
    try:
        process = subprocess.Popen(command, env=os.environ | environ)
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from None
    started = start_time(process.pid)
    try:
        while process.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C reached the command as well: it decides
                process.wait()
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        end_processes([(process.pid, started)], signal.SIGTERM, 10)
