"""``python -m mpdemo cluster up|down|run``: start, stop, or borrow a throw-away Slurm cluster.

python -m mpdemo cluster up FOLDER --nodes 2     # prints the line that points Slurm's commands at it
python -m mpdemo cluster down FOLDER
python -m mpdemo cluster run --nodes 4 -- pytest --nbval notebooks/
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys

from mpdemo.cluster import Cluster
from mpdemo.errors import UserError
from mpdemo.jobs.site import wanted_by_sites
from mpdemo.world.processes import end_processes, start_time


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
        sub.add_argument("--cpus", type=count(1, 4096), default=96, help="processors of each node, invented (96)")
        sub.add_argument("--gpus", type=count(0, 64), default=4, help="GPUs of each node, invented (4)")
        sub.add_argument("--network", choices=["auto", "namespaces", "hosts", "none"], default="auto")
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
        Cluster(args.folder).down()
        return 0
    options = {name: getattr(args, name) for name in ("nodes", "cpus", "gpus", "network")}
    options["wanted"] = wanted_by_sites()
    if args.action == "up":
        cluster = Cluster.up(args.folder, **options)
        print(f"export SLURM_CONF={cluster.environ['SLURM_CONF']}")
        describe(cluster)
        return 0
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        raise UserError("nothing to run; do: python -m mpdemo cluster run -- COMMAND")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that SIGTERM ends the `with` block as well
    with Cluster.up(owned=True, **options) as cluster:
        describe(cluster)
        return run_command(command, cluster)


def describe(cluster):
    """Print on stderr what was started, and what is missing where nodes share one network."""
    print(f"cluster of {len(cluster.nodes)} nodes in {cluster.folder} (network: {cluster.network})", file=sys.stderr)
    if cluster.network == "none":
        print("node names do not resolve here (unshare is refused): jobs over two nodes cannot meet", file=sys.stderr)


def run_command(command, cluster) -> int:
    """Run a command on the cluster and return its exit status; the command ends when this process does."""
    try:
        process = subprocess.Popen(command, env=os.environ | cluster.environ)
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
