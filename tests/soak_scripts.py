"""The scripts to take home, killed at random for a given time: nothing may be lost.

    python tests/soak_scripts.py --minutes 10 --seed 3        what `make soak` runs

Each life is one training of `CASES`, most of them on this machine, every fourth by the batch script on a throw-away
Slurm. Trouble comes at a random moment, the same command runs again, and so on. Then every loss of every step and
epoch, and the last checkpoint, must be those of the same training that nobody troubled: bit for bit on the same number
of processes; where it resumed on another, the losses within `TOLERANCE`. Exit status 1: a count that must be 0 is not.
"""

import collections
import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import lives
from home_scripts import look_up, run, submit, told
from soak_life import BOUND, Life, References, slowed
from worker_jobs import until

from mpdemo.errors import UserError
from mpdemo.tools.cluster import Cluster

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
            self.slurm("scontrol", "update", "partition=debug", "GraceTime=0")
            options = ["--nodes=2", "--gpus-per-node=1", "--signal=B:USR1@60"]
            changes = [("CHECKPOINT=train_ddp", "CHECKPOINT=a")]
            command = " ".join(["run.py", *self.training.words("a")])
            self.job = submit(self.training.folder, command, *options, changes=changes)
            for kind in self.troubles:
                self.suffer(kind, options)
            until(lambda: look_up(self.job).state not in ("pending", "running"), BOUND)
            if (state := look_up(self.job).state) != "done":
                raise RuntimeError(f"its job has ended: {state}; {self.read()[-1500:]}")
        self.note(told(self.read()))
        self.compare()

    def suffer(self, kind, options):
        """Make trouble when the job is somewhere in its first steps; then let it start again at once."""
        newest = max([0, *self.training.steps("a")])
        step = f"step {newest + self.dice.randint(1, 3)}:"
        until(lambda: look_up(self.job).state not in ("pending", "running") or step in self.read(), BOUND)
        if look_up(self.job).state != "running":
            return
        getattr(self, kind)(self.slurm("squeue", "--noheader", f"--jobs={self.job}", "--format=%B"))
        self.counts[f"trouble: {kind}, on Slurm"] += 1
        if kind == "cancel":
            self.job = self.slurm("sbatch", "--parsable", *options, "train.sbatch")
            return
        until(lambda: look_up(self.job).state != "running", 120)
        time.sleep(2)  # a node refuses a job that starts again within the second of its end
        with contextlib.suppress(AssertionError):  # it has already started
            # `limit` cut it
            self.slurm("scontrol", "update", f"jobid={self.job}", "StartTime=now", "TimeLimit=30")

    def slurm(self, *words) -> str:
        return run(self.training.folder, *words).strip()

    def read(self) -> str:
        return "".join(path.read_text() for path in self.training.folder.glob("*.out"))

    def limit(self, node):
        self.slurm("scontrol", "update", f"jobid={self.job}", "EndTime=now+45")  # Slurm looks every 30 s

    def cancel(self, node):
        self.slurm("scancel", self.job)
        until(lambda: look_up(self.job).state not in ("pending", "running"), 60)

    def preempted(self, node):
        urgent = ["--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null"]
        self.slurm("sbatch", *urgent, "--wrap=sleep 2")

    def grace(self, node):
        self.slurm("scontrol", "update", "partition=debug", "GraceTime=20")
        self.preempted(node)
        until(lambda: look_up(self.job).state != "running", 60)
        self.slurm("scontrol", "update", "partition=debug", "GraceTime=0")

    def node(self, node):
        self.cluster.kill_node(node)
        self.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
        self.cluster.start_node(node)
        until(lambda: self.slurm("sinfo", "--noheader", f"--nodes={node}", "--format=%T") == "idle", 60)


def main() -> int:
    """Run the soak; print its counts."""
    args = lives.read_arguments()
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

        lives.live(make, args, counts)
    return lives.report(counts, ZERO, folder)


if __name__ == "__main__":
    sys.exit(main())
