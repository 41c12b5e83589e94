"""A real job of four processes, two for each of two nodes that are played, into which a fault is put."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from mpdemo.paths import source
from mpdemo.world.family import held_port
from mpdemo.world.processes import be_killed_with_parent, child_environment
from mpdemo.world.warm import run_program

# s without a step, s until the first one, s in all: the pager rings
QUIET, BEGIN, LONGEST = 8.0, 100.0, 200.0
PAUSES = 8  # times the longest pause so far, on a busy machine
RANKS, STEPS = range(4), 78
LAST_WEEK = Path(__file__).with_name("train.py").read_text()  # the program without the fault


def run_rank(program, environment, output):
    """Run the program in a forked process, as a fresh Python would."""
    be_killed_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # whatever the parent has put there
    os.environ.clear()
    os.environ.update(environment)
    run_program([str(program)])


class Job:
    """The job: its folder, its program, its processes, and what a fault may do to them."""

    def __init__(self, random):
        self.random, self.rank = random, int(random.integers(4))
        self.out = Path(tempfile.mkdtemp(prefix="on-call-"))
        self.log, self.program = self.out / "job.log", LAST_WEEK
        self.processes, self.variables, self.threads, self.closing = [], {}, [], []
        self.id, self.ended, self.restarts, self.gpu_text = os.getpid(), False, 0, ""
        self.lost = None  # the node that is gone
        self.closing.append((held := held_port()).close)
        self.port = held.getsockname()[1]
        for folder in ("data", "node1", "node2"):
            (self.out / folder).mkdir()
        digits = dict(np.load(source() / "mpdemo/data/digits.npz"))
        order = np.random.default_rng(1).permutation(len(digits["labels"]))
        for rank in RANKS:  # as many images for each rank; the last 180 are for the test
            for part, ids in (("train", order[rank:1616:4]), ("test", order[1616 + rank : 1796 : 4])):
                values = {
                    "images": digits["images"][ids].astype(np.float16),
                    "labels": digits["labels"][ids],
                }
                np.savez_compressed(self.out / f"data/{part}-{rank}.npz", **values)

    @property
    def node(self):
        return self.rank // 2 + 1

    # what a fault may do

    def edit(self, old, new):
        """Change one place of the program."""
        assert self.program.count(old) == 1, old
        self.program = self.program.replace(old, new)

    def resume(self):
        """Let one process train first, and give both nodes its checkpoints of steps 20 and 40: the job resumes."""
        (program := self.out / "train.py").write_text(self.program)
        env = child_environment() | self.own_variables(0) | {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        subprocess.run([sys.executable, program], env=env, check=True, capture_output=True, timeout=LONGEST)
        for name in ("node1/step060.pt", "metrics-0", "recorder_0"):
            (self.out / name).unlink()
        shutil.copytree(self.out / "node1", self.out / "node2", dirs_exist_ok=True)

    def during(self, act, after_step=None, when=None):
        """Act while the job runs: after a step, or as soon as `when()` is true."""

        def watch():
            while not self.ended and not (
                when() if when else self.step >= after_step and len(self.pids()) == 4
            ):
                time.sleep(0.001 if when else 0.1)
            if not self.ended:
                act()

        self.threads.append(threading.Thread(target=watch, daemon=True))

    def send(self, sign, ranks=RANKS):
        """Send a signal to those ranks that are still there."""
        for rank, pid in self.pids().items():
            with contextlib.suppress(ProcessLookupError):
                if rank in ranks:
                    os.kill(pid, sign)

    # its life

    def own_variables(self, rank):
        """The variables that the job sets for a rank."""
        names = {
            "OUT": self.out,
            "RANK": rank,
            "WORLD_SIZE": 4,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
        }
        names |= {"OMP_NUM_THREADS": 1, "TORCH_FR_BUFFER_SIZE": 2000, "TORCH_SHOW_CPP_STACKTRACES": 0}
        return {name: str(value) for name, value in names.items()} | self.variables.get(rank, {})

    def run(self):
        """Run the job, again where it's requeued, until the pager rings; return its state then."""
        (self.out / "train.py").write_text(self.program)
        self.start_ranks()
        for thread in self.threads:
            thread.start()
        self.wait()
        for _ in range(self.restarts):
            self.start_ranks()
            self.wait()
        return self.state()

    def start_ranks(self):
        """Fork the ranks from this process, which has already imported PyTorch and has computed nothing with it."""
        self.processes, self.labels = [], []
        for rank in RANKS:
            words = ["sed", "-u", f"s/^/{rank}: /"]  # as `srun --label`
            with open(self.log, "ab") as log:
                self.labels.append(label := subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log))
            env = child_environment() | self.own_variables(rank)
            args = self.out / "train.py", env, label.stdin.fileno()
            process = multiprocessing.get_context("fork").Process(target=run_rank, args=args, daemon=True)
            process.start()
            label.stdin.close()
            self.processes.append(process)

    def wait(self):
        """Wait until the pager rings: the job has ended, or no step came for some seconds, or its time is over."""
        begin = last = time.monotonic()
        size, pause = -1, 0.0
        while self.state() == "RUNNING":
            now, stepping = time.monotonic(), 0 < self.step < STEPS
            written = [*self.out.glob("metrics-*"), *self.out.glob("job.log")]
            if size != (size := sum(file.stat().st_size for file in written)):
                pause, last = max(pause, (now - last) * stepping), now
            failed = any(process.exitcode for process in self.processes)
            quiet = max(QUIET, PAUSES * pause) if stepping or failed else BEGIN
            if now - last > quiet or now - begin > LONGEST:
                return
            time.sleep(0.3)
        for label in self.labels:
            label.wait(5)  # for the end of what it writes

    def pids(self):
        """Return the process of each rank that is alive."""
        return {
            rank: process.pid for rank, process in enumerate(self.processes) if process.exitcode is None
        }

    def state(self):
        """Return RUNNING, or how the job ended, in a word of Slurm's."""
        codes = [process.exitcode for process in self.processes]
        if self.lost and None not in codes:
            return "NODE_FAIL"
        return "RUNNING" if None in codes else "FAILED" if any(codes) else "COMPLETED"

    def kill_node(self):
        """End the ranks of the fault's node, as a power cut does."""
        self.lost = self.node
        self.send(signal.SIGKILL, [2 * self.node - 2, 2 * self.node - 1])

    def ends(self):
        """Say of each process how it ended, and of each node whether it answers."""
        said = []
        for rank, process in enumerate(self.processes):
            code = process.exitcode
            end = "is alive" if code is None else f"exit code {code}"
            said.append(f"rank {rank}: {'no answer' if self.lost == rank // 2 + 1 else end}")
        nodes = [f"node{number} {'down' if number == self.lost else 'idle'}" for number in (1, 2)]
        return [*said, "sinfo: " + ", ".join(nodes)]

    def rows(self, rank):
        """Return a rank's numbers: step, epoch, first sample, loss, load, compute, all-reduce, norm of the weights."""
        file = self.out / f"metrics-{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        return np.array(
            [[float(word) for word in line.split()] for line in lines if len(line.split()) == 8]
        )

    @property
    def step(self):
        rows = self.rows(0)
        return int(rows[-1, 0]) if len(rows) else 0

    def close(self):
        """End every process, and remove the folder."""
        self.ended = True
        self.send(signal.SIGKILL)
        for waiting in (*self.processes, *self.threads):
            if waiting.is_alive():
                waiting.join(10)
        for act in self.closing:
            act()
        shutil.rmtree(self.out, ignore_errors=True)
