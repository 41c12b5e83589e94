"""``python -m mpdemo cluster up|down|run``: start, stop, or borrow a throw-away Slurm cluster.

python -m mpdemo cluster up /tmp/mine --nodes 2     # prints the line that points Slurm's commands at it
python -m mpdemo cluster down /tmp/mine
python -m mpdemo cluster run --nodes 4 -- pytest --nbval notebooks/
"""

import argparse
import os
import signal
import subprocess
import sys

from mpdemo.cluster.cluster import Cluster
from mpdemo.jobs.site import wanted_by_sites


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
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")


def count(low, high):
    """Return a converter for argparse that takes whole numbers from `low` to `high`."""

    def convert(text):
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return convert


def main(args) -> int:
    """Run one form of the command; return its exit status (for ``run``, the command's own)."""
    if args.action == "down":
        Cluster(args.folder).down()
        return 0
    options = {"nodes": args.nodes, "cpus": args.cpus, "gpus": args.gpus, "network": args.network}
    if args.action == "up":
        cluster = Cluster.up(args.folder, wanted=wanted_by_sites(), **options)
        print(f"export SLURM_CONF={cluster.environ['SLURM_CONF']}")
        describe(cluster)
        return 0
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        print("mpdemo: error: nothing to run; do: python -m mpdemo cluster run -- COMMAND", file=sys.stderr)
        return 2
    # A polite kill must not skip the `with` block's end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Cluster.up(wanted=wanted_by_sites(), owned=True, **options) as cluster:
        describe(cluster)
        return run_command(words, cluster)


def describe(cluster):
    """Say on stderr what was started, and what is missing where nodes share one network."""
    print(f"cluster of {len(cluster.nodes)} nodes in {cluster.folder} (network: {cluster.network})", file=sys.stderr)
    if cluster.network == "none":
        print("node names do not resolve here (unshare is refused): jobs over two nodes cannot meet", file=sys.stderr)


def run_command(words, cluster) -> int:
    """Run a command on the cluster; its end is waited for, ours ends it."""
    try:
        process = subprocess.Popen(words, env=os.environ | cluster.environ)
    except OSError as error:
        print(f"mpdemo: error: cannot run {words[0]}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        while True:
            try:
                status = process.wait()
                return status if status >= 0 else 128 - status
            except KeyboardInterrupt:
                pass  # Ctrl-C reached the command as well: it decides
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
