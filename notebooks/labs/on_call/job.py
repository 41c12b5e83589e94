"""A real job of four processes on two nodes, into which a fault is put: processes of this machine, or of Slurm."""

import contextlib
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from mpdemo.paths import source
from mpdemo.world.processes import child_environment

QUIET, BEGIN, LONGEST = 8.0, 100.0, 200.0  # s without a step, s until the first one, s in all: the pager rings
PAUSES = 8  # times the longest pause so far, on a busy machine
RANKS, STEPS = range(4), 78


def run_rank(program, environment, output):
    """Run the program in a forked process, as a fresh Python would."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    runpy.run_path(str(program), run_name="__main__")


class Job:
    """The job: its folder, its program, its processes, and what a fault may do to them."""

    def __init__(self, random):
        self.random, self.rank = random, int(random.integers(4))
        self.out = Path(tempfile.mkdtemp(prefix="on-call-"))
        self.log = self.out / "job.log"
        self.program = Path(__file__).with_name("train.py").read_text()
        self.processes, self.variables, self.threads, self.closing = [], {}, [], []
        self.ended, self.restarts, self.gpu_text, self.paged = False, 0, "", ""
        self.id = os.getpid()
        with socket.create_server(("", 0)) as free:
            self.port = free.getsockname()[1]
        for folder in ("data", "node1", "node2"):
            (self.out / folder).mkdir()
        self._write_data()

    @property
    def node(self):
        return self.rank // 2 + 1

    def _write_data(self):
        digits = dict(np.load(source() / "mpdemo/data/digits.npz"))
        order = np.random.default_rng(1).permutation(len(digits["labels"]))
        for rank in RANKS:  # as many images for each rank; the last 180 are for the test
            for part, ids in (("train", order[rank:1616:4]), ("test", order[1616 + rank : 1796 : 4])):
                values = {"images": digits["images"][ids].astype(np.float16), "labels": digits["labels"][ids]}
                np.savez_compressed(self.out / f"data/{part}-{rank}.npz", **values)

    # what a fault may do

    def edit(self, old, new):
        """Change one place of the program."""
        assert self.program.count(old) == 1, old
        self.program = self.program.replace(old, new)

    def resume(self):
        """Let one process train first, and give both nodes its checkpoints of steps 20 and 40: the job resumes."""
        (earlier := self.out / "earlier" / "node1").mkdir(parents=True)
        (earlier.parent / "data").symlink_to(self.out / "data")
        (program := earlier.parent / "train.py").write_text(self.program)
        env = self.environment(0) | {"WORLD_SIZE": "1", "OUT": str(earlier.parent)}
        subprocess.run([sys.executable, program], env=env, check=True, capture_output=True, timeout=LONGEST)
        for node in (1, 2):
            for step in ("step020.pt", "step040.pt"):
                shutil.copy(earlier / step, self.out / f"node{node}")
        shutil.rmtree(earlier.parent)

    def during(self, act, after_step=None, when=None):
        """Act while the job runs: after a step, or as soon as `when()` is true."""

        def watch():
            while not self.ended and not (when() if when else self.step >= after_step and len(self.pids()) == 4):
                time.sleep(0.001 if when else 0.1)
            if not self.ended:
                act()

        self.threads.append(threading.Thread(target=watch, daemon=True))

    def send(self, rank, sign):
        """Send a signal to a rank, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            if pid := self.pids().get(rank):
                os.kill(pid, sign)

    # its life

    def own_variables(self, rank):
        """The variables that the job sets for a rank."""
        names = {"OUT": self.out, "RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        names |= {"OMP_NUM_THREADS": 1, "TORCH_FR_BUFFER_SIZE": 2000, "TORCH_SHOW_CPP_STACKTRACES": 0}
        return {name: str(value) for name, value in names.items()} | self.variables.get(rank, {})

    def environment(self, rank):
        """All variables of a rank's process."""
        return child_environment() | self.own_variables(rank)

    def start(self):
        (self.out / "train.py").write_text(self.program)
        self._start_ranks()
        for thread in self.threads:
            thread.start()

    def _start_ranks(self):
        """Fork the ranks from this process, which has already imported PyTorch and has computed nothing with it."""
        self.processes, self.writers = [], []
        for rank in RANKS:
            read, write = os.pipe()
            words = {"args": (self.out / "train.py", self.environment(rank), write), "daemon": True}
            process = multiprocessing.get_context("fork").Process(target=run_rank, **words)
            process.start()
            os.close(write)
            self.processes.append(process)
            self.writers.append(threading.Thread(target=self._label, args=(rank, read), daemon=True))
        for writer in self.writers:  # only now: a process with threads shouldn't be forked
            writer.start()

    def _label(self, rank, pipe):
        """Write a rank's lines into the log with its number, as `srun --label` does."""
        with open(pipe, "rb") as lines, open(self.log, "ab", buffering=0) as log:
            for line in lines:
                log.write(b"%d: %b" % (rank, line))

    def pids(self):
        """Return the process of each rank that is alive."""
        return {rank: process.pid for rank, process in enumerate(self.processes) if process.exitcode is None}

    def state(self):
        """Return RUNNING, or how the job ended, in a word of Slurm's."""
        codes = [process.exitcode for process in self.processes]
        if None in codes or not any(codes):
            return "RUNNING" if None in codes else "COMPLETED"
        return "FAILED"

    def in_words(self):
        """Say what Slurm would say of the job and of its processes."""
        codes = [process.exitcode for process in self.processes]
        ends = [f"rank {r}: {'is alive' if code is None else f'exit code {code}'}" for r, code in enumerate(codes)]
        return f"job {self.id}: {self.state()}, requeued {self.restarts} times; {'; '.join(ends)}"

    def failed(self):
        """Whether a process has failed while others may still run."""
        return any(process.exitcode for process in self.processes)

    def wait(self):
        """Wait until the pager rings: the job has ended, or no step came for some seconds, or its time is over."""
        begin = last = time.monotonic()
        size, left, pause = -1, self.restarts, 0.0
        while (now := time.monotonic()) - begin < LONGEST:
            if (state := self.state()) == "FAILED" and left:
                left -= 1
                self._start_ranks()
            elif state != "RUNNING":
                break
            stepping = 0 < self.step < STEPS
            if size != (size := self._written()):
                pause, last = max(pause, (now - last) * stepping), now
            if now - last > (max(self.patience, PAUSES * pause) if stepping or self.failed() else BEGIN):
                break
            time.sleep(0.3)
        self.paged = self.state()
        for writer in self.writers if self.paged != "RUNNING" else ():
            writer.join(5)

    patience = QUIET

    def _written(self):
        files = [*self.out.glob("metrics-*"), *self.out.glob("job.log")]
        return sum(file.stat().st_size for file in files)

    def rows(self, rank):
        """Return a rank's numbers: step, epoch, first sample, loss, load, compute, all-reduce, norm of the weights."""
        file = self.out / f"metrics-{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        return np.array([[float(word) for word in line.split()] for line in lines if len(line.split()) == 8])

    @property
    def step(self):
        rows = self.rows(0)
        return int(rows[-1, 0]) if len(rows) else 0

    def kill_node(self):
        raise NotImplementedError("a node's death looks like an OOM kill without Slurm")

    def close(self):
        """End every process, and remove the folder."""
        self.ended = True
        for rank in RANKS:
            self.send(rank, signal.SIGKILL)
        for process in self.processes:
            process.join(10)
        for thread in self.threads:
            if thread.is_alive():
                thread.join(5)
        for act in self.closing:
            act()
        shutil.rmtree(self.out, ignore_errors=True)


class SlurmJob(Job):
    """The job as a batch job on two nodes of a throw-away cluster."""

    patience = QUIET + 12  # Slurm finds a dead node after 10 s
    writers = ()

    def __init__(self, random, cluster):
        super().__init__(random)
        self.cluster, self.found = cluster, {}

    def _start_ranks(self):
        for rank in RANKS:
            own = self.own_variables(rank) | {"MASTER_ADDR": "node1"}
            lines = "".join(f"export {name}={value}\n" for name, value in own.items())
            (self.out / f".env-{rank}").write_text(lines)
        task = f". {self.out}/.env-$SLURM_PROCID; exec {sys.executable} -u {self.out}/train.py"
        script = f"#!/bin/bash\nsrun --label --kill-on-bad-exit=0 bash -c '{task}'\n"
        (self.out / "job.sbatch").write_text(script)
        words = ["sbatch", "--parsable", "-J", "digits", "-N2", "--ntasks-per-node=2", "--no-requeue", "-t5"]
        words += [f"--chdir={self.out}", f"--output={self.log}", str(self.out / "job.sbatch")]
        self.id = self.cluster.client(*words).stdout.strip()

    def pids(self):
        """The processes of all nodes can be seen from here."""
        if len(self.found) < 4:
            for process in psutil.process_iter(["cmdline", "environ"]):
                words, env = process.info["cmdline"] or [], process.info["environ"] or {}
                if words[-1:] == [f"{self.out}/train.py"] and "python" in words[0]:
                    self.found[int(env["RANK"])] = process.pid
        return {rank: pid for rank, pid in self.found.items() if psutil.pid_exists(pid)}

    def state(self):
        said = self.cluster.client("squeue", "-h", "-t", "all", "-o", "%T", "-j", self.id).stdout.strip()
        return "RUNNING" if said in ("PENDING", "CONFIGURING", "COMPLETING") else said

    def in_words(self):
        alive = [f"rank {rank}: {'is alive' if rank in self.pids() else 'has ended'}" for rank in RANKS]
        nodes = self.cluster.client("sinfo", "-hNo", "%N %T").stdout.splitlines()
        return f"job {self.id}: {self.state()}, requeued 0 times; {'; '.join(alive)}; sinfo: {', '.join(nodes)}"

    def failed(self):
        return False

    def kill_node(self):
        self.cluster.kill_node(f"node{self.node}")

    def close(self):
        self.cluster.client("scancel", self.id)
        super().close()
