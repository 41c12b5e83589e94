"""``mpdemo cluster run``: borrow a throw-away Slurm cluster for one command.

mpdemo cluster run --nodes 4 -- pytest --nbval notebooks/
mpdemo cluster run --nodes 2 -- mpdemo rehearse
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys

from mpdemo.errors import UserError
from mpdemo.options import count
from mpdemo.tools.cluster import Cluster
from mpdemo.world.processes import clean_up_on_signals, end_processes, start_time


def add_arguments(parser):
    """Declare the one form of the command."""
    actions = parser.add_subparsers(required=True, metavar="run")
    run = actions.add_parser("run", help="start a cluster, run a command on it, take it down")
    run.add_argument("--nodes", type=count(1, 64), default=4, help="number of nodes (default 4)")
    run.add_argument("--mbit", type=count(1, 100_000), help="slow the network of the nodes (root only)")
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments"
    )


def main(args) -> int:
    """Run the command on a cluster of its own; return its exit status."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        raise UserError("nothing to run; do: mpdemo cluster run -- COMMAND")
    clean_up_on_signals()  # which end the `with` block as well
    with Cluster.up(nodes=args.nodes, mbit=args.mbit) as cluster:
        print(
            f"cluster of {args.nodes} nodes in {cluster.folder} (network: {cluster.network})",
            file=sys.stderr,
        )
        if cluster.network == "none":
            lost = "node names do not resolve here (unshare is refused): jobs over two nodes cannot meet"
            print(lost, file=sys.stderr)
        return run_command(command, cluster.environ)


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
