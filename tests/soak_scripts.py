"""The scripts to take home, killed at random for a given time: nothing may be lost.

    python tests/soak_scripts.py --minutes 10 --seed 3        what `make soak` runs

Each life is one training of `CASES`, most of them on this machine, every fourth by the batch script on a throw-away
Slurm. Trouble comes at a random moment, the same command runs again, and so on. Then every loss of every step and
epoch, and the last checkpoint, must be those of the same training that nobody troubled: bit for bit on the same number
of processes; where it resumed on another, the losses within `TOLERANCE`. Exit status 1: a count that must be 0 is not.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from home_scripts import asked, log_of, lose, preempt, reach_limit, run, start_now, submit, told
from soak_life import BOUND, Life, References, slowed
from worker_jobs import ended, until

from mpdemo.errors import UserError
from mpdemo.jobs.slurm_job import look_up
from mpdemo.tools.cluster import Cluster

AT_ONCE = 2  # lives
ZERO = ("errors", "hangs", "left behind", "lost", "unequal")  # counts that must be 0
SLURM = threading.Lock()  # one life at a time, as it may change the partition or kill a node


class SlurmLife(Life):
    """One training by the batch script, on two nodes; Slurm lets its job start again, except after `cancel`."""

    cases, kinds, cluster = (
        ["train_ddp", "train_fsdp"],
        ("limit", "grace", "preempted", "node", "cancel"),
        None,
    )

    def live(self):
        with SLURM:
            self.training.change(slowed(1))
            options = ["--nodes=2", "--gpus-per-node=1", "--signal=B:USR1@60"]
            changes = [("CHECKPOINT=train_ddp", "CHECKPOINT=a")]
            command = " ".join(["run.py", *self.training.words("a")])
            self.job = submit(self.training.folder, command, *options, changes=changes)
            for kind in self.troubles:
                self.suffer(kind, options)
            if (state := ended(self.job, BOUND)) != "done":
                raise RuntimeError(f"its job has ended: {state}; {log_of(self.training.folder)[-1500:]}")
        self.note(told(log_of(self.training.folder)))
        self.compare()

    def suffer(self, kind, options):
        """Make trouble when the job is somewhere in its first steps; then let it start again at once."""
        newest, folder = max([0, *self.training.steps("a")]), self.training.folder
        step = f"step {newest + self.dice.randint(1, 3)}:"
        until(
            lambda: look_up(self.job).state not in ("pending", "running") or step in log_of(folder), BOUND
        )
        if look_up(self.job).state != "running":
            return
        getattr(self, kind)()
        self.counts[f"trouble: {kind}, on Slurm"] += 1
        if kind == "cancel":
            words = ["sbatch", "--parsable", *options, "train.sbatch"]
            self.job = run(folder, *words).strip()
            return
        with contextlib.suppress(subprocess.CalledProcessError):  # it has already started
            start_now(self.job)  # for longer than `limit` left it

    def limit(self):
        reach_limit(self.job)

    def cancel(self):
        run(self.training.folder, "scancel", self.job)
        ended(self.job)

    def preempted(self):
        preempt(self.job)

    def grace(self):
        preempt(self.job, 20)

    def node(self):
        lose(self.cluster, asked("squeue", f"--jobs={self.job}", "--format=%B"))


def live(make, minutes, seed, counts):
    """Live one life after the other, AT_ONCE at once; ``make`` returns that of a number, with dice of its own."""
    started = time.monotonic()

    def some(first):
        for number in itertools.count(first, AT_ONCE):
            if time.monotonic() > started + 60 * minutes:
                return
            try:
                make(number, random.Random(f"{seed} {number}")).live()
            except Exception as error:
                counts["errors"] += 1
                print(f"error in life {number}: {type(error).__name__}: {error}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(some, range(AT_ONCE)))
    counts["minutes"] = round((time.monotonic() - started) / 60)


def main() -> int:
    """Run the soak; print its counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts = collections.Counter(dict.fromkeys(ZERO, 0))
    folder = Path(tempfile.mkdtemp(prefix="mpdemo-soak-"))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(UserError):  # without Debian's Slurm all lives are on this machine
            SlurmLife.cluster = stack.enter_context(Cluster.up(nodes=3, urgent=True))
            os.environ |= SlurmLife.cluster.environ
        references = References(folder)

        def make(number, dice):
            kind = SlurmLife if SlurmLife.cluster and number % 4 == 0 else Life
            return kind(number, dice, counts, references)

        live(make, args.minutes, args.seed, counts)
    print(json.dumps(counts, indent=1, sort_keys=True))
    if any(counts[kind] for kind in ZERO):
        print(f"the runs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
