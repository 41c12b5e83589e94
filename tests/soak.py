"""Trainings that are killed, cancelled, warned and requeued at random, for a given time: nothing may be lost.

    make soak                                    # 30 minutes, on a throw-away Slurm and on this machine
    python tests/soak.py --minutes 5 --seed 3

Each life is one training of `CASES`. It is submitted with ``--resume auto``, troubled at a random moment, submitted
again by the same command, and so on. At the end its losses, epochs, weights and optimizer must be, bit for bit, those
of the same training that nobody troubled. Meanwhile the cluster's controller is restarted now and then. Exit status 1:
one of the counts that must be 0 is not.
"""

import collections
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import lives
import psutil
import torch
from worker_jobs import came

from mpdemo import paths
from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, load_site, slurm, submit
from mpdemo.jobs.submit import make_folder, start
from mpdemo.options import as_arguments
from mpdemo.tools.cluster import Cluster
from mpdemo.training import checkpoint

STEPS = 24
COMMON = {"model": "transformer", "batch_size": 32, "steps": STEPS, "log_every": 1, "resume": "auto"}
COMMON |= {"checkpoint_every": 2, "optimizer": "adamw", "warmup_steps": 4}
CASES = {  # settings, and processes
    "single": ({"rung": "single"}, 1),
    "data_parallel": ({"rung": "data_parallel", "devices": 2}, 1),
    "ddp": ({"rung": "ddp"}, 2),
    "model_parallel": ({"rung": "model_parallel"}, 2),
    "1f1b": ({"rung": "pipeline", "microbatches": 4}, 2),
    "zbv": ({"rung": "pipeline", "microbatches": 4, "schedule": "ZBVZeroBubble"}, 2),
    "one-process pipeline": ({"rung": "pipeline", "form": "one-process", "microbatches": 4, "devices": 2}, 1),
    "fsdp": ({"rung": "fsdp"}, 2),
    "tensor": ({"rung": "tensor"}, 2),
    "hybrid": ({"rung": "hybrid", "replicas": 2, "microbatches": 2}, 4),
}
# What can befall a job, and the states in which it may end then. The first three are a SIGKILL to one process.
STATES = {"rank": {"failed"}, "launcher": {"failed"}, "supervisor": {"cancelled"}, "cancel": {"cancelled"}}
STATES |= {"warn": {"stopped"}, "limit": {"stopped"}, "job": {"cancelled", "failed"}, "preempted": {"cancelled"}}
STATES |= {"node": {"node_failure"}, "requeue": set()}
HERE = ("rank", "supervisor", "cancel", "warn")
REQUEUED = ("warn", "limit", "requeue", "preempted", "node")  # troubles after which a job may start again by itself
NOT_REQUEUED = {"stopped", "failed", "node_failure"}  # how it ends instead, where the controller is away just then
CLUSTER = threading.Lock()  # of what starts and stops its daemons
REFERENCES = collections.defaultdict(threading.Lock)  # by case
CPUS = "4"  # of each node
BOUND = 240  # seconds that a job may take, start and all; longer is a hang
MEASURED = {"time", "images_per_second", "peak_memory_mib", "utilisation", "mfu"}  # in the rows of the metrics
ZERO = ("hangs", "wrong states", "orphans", "unequal lives", "errors")  # counts that must be 0


class Life:
    """One training, from its first submission to its end, with troubles on the way."""

    def __init__(self, number, dice, counts, cluster):
        self.dice, self.counts, self.cluster = dice, counts, cluster
        self.case = dice.choice(list(CASES))
        self.by_slurm = dice.random() < 0.7
        requeue = self.by_slurm and dice.random() < 0.4
        self.spec = spec_of(self.case, f"runs/soak/{number}", f"soak{number}", requeue)
        left_out = ("supervisor",) if requeue else ("supervisor", "requeue")
        kinds = [kind for kind in STATES if kind not in left_out] if self.by_slurm else HERE
        self.troubles = dice.choices(kinds, k=dice.randint(1, 3))
        self.what = f"life {number} ({self.case}, {'Slurm' if self.by_slurm else 'here'})"

    def live(self):
        """Submit until the training is done; then compare it."""
        state = ""
        while state != "done":
            self.counts["resumed"] += bool(checkpoint.in_order(paths.root() / self.spec.out / "checkpoints"))
            self.counts["submissions"] += 1
            job = submit_to_slurm(self.spec) if self.by_slurm else start_here(self.spec)
            allowed = self.trouble(job, self.troubles.pop()) if self.troubles else {"done"}
            try:
                state = job.wait(BOUND, pending=BOUND)
            except TimeoutError:
                self.fault("hangs", f"job {job.id} is still {job.state}")
                job.cancel()
                return
            if state not in allowed:
                self.fault("wrong states", f"{state} ({job.reason}), not {allowed}: {job.log()[-600:]}")
                return
            self.counts["not requeued"] += state in NOT_REQUEUED and allowed > NOT_REQUEUED
            if not came(lambda: processes(self.spec) == [], 5):
                self.fault("orphans", str(processes(self.spec)))
                for process in processes(self.spec):
                    process.kill()
        self.counts["lives"] += 1
        run_reference(self.case)
        if left_by(self.spec.out) != left_by(f"runs/reference/{self.case}"):
            self.fault("unequal lives", f"see {paths.root() / self.spec.out}")

    def trouble(self, job, kind) -> set:
        """Wait for a random moment and make trouble; return the states in which the job may end."""
        self.wait_for_a_moment(job)
        if job.state != "running":
            return {"done"}
        with contextlib.suppress(psutil.NoSuchProcess, UserError, IndexError):  # a process that has just ended
            self.make(kind, job)
            self.counts[f"trouble: {kind}"] += 1
        if not (self.spec.requeue and kind in REQUEUED):
            return STATES[kind] | {"done"}
        came(lambda: job.state == "pending" or job.finished, 40)
        with contextlib.suppress(slurm.SlurmError):  # else it waits for two minutes, and nobody learns anything
            slurm.client("scontrol", "update", f"jobid={job.id}", "starttime=now")
        return {"done", *NOT_REQUEUED}

    def make(self, kind, job):
        """Make one kind of trouble."""
        node = slurm.client("squeue", "-h", "-j", job.id, "-o", "%N").strip() if self.by_slurm else ""
        if kind in ("cancel", "warn"):
            getattr(job, kind)()
        elif kind == "supervisor":
            psutil.Process(int(job.id)).kill()
        elif kind in ("rank", "launcher"):
            wanted = [process for process in processes(self.spec) if is_launcher(process) == (kind == "launcher")]
            self.dice.choice(wanted or processes(self.spec)).kill()
        elif kind == "job":
            slurm.client("scancel", "--signal=KILL", job.id)
        elif kind == "preempted":
            slurm.client("sbatch", "-p", "urgent", "-w", node, "-c", CPUS, "-o", "/dev/null", "--wrap=sleep 2")
        elif kind == "limit":  # Slurm looks every 30 s, and warns when 60 s are left
            slurm.client("scontrol", "update", f"jobid={job.id}", "EndTime=now+45")
            came(lambda: job.state != "running", 40)
        elif kind == "requeue":
            slurm.client("scontrol", "requeue", job.id)
        else:
            with CLUSTER:
                self.cluster.kill_node(node)
                slurm.client("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
                self.cluster.start_node(node)
                came(lambda: slurm.client("sinfo", "-h", "-n", node, "-o", "%T").strip() in ("idle", "allocated"), 30)

    def wait_for_a_moment(self, job):
        """Wait until the job runs, then for some of its first seconds, for some step, or for a write under way."""
        came(lambda: job.state != "pending", 120)
        how = self.dice.choice(["start", "step", "step", "write"])
        step, out = self.dice.randint(1, STEPS - 1), paths.root() / self.spec.out
        if how == "step":
            came(lambda: job.finished or len(job.metrics()) > step, 120)
        time.sleep(self.dice.uniform(0, {"start": 10, "step": 0.3, "write": 6}[how]))
        if how == "write":  # a checkpoint that is being written is a folder without its name
            came(lambda: job.finished or any((out / "checkpoints").glob("*.tmp")), 20, pause=0.002)

    def fault(self, kind, text):
        self.counts[kind] += 1
        print(f"{kind}: {self.what}: {text}", flush=True)


def spec_of(case, out, name) -> JobSpec:
    settings, processes_per_node = CASES[case]
    command = ("-m", "mpdemo", "train", *as_arguments({**COMMON, **settings, "out": out}))
    options = {"signal": "USR1@60", "oversubscribe": True, "gpus_per_process": 0}
    options["cpus_per_process"] = int(CPUS) // processes_per_node  # a node for each job: what hits one hits no other
    return JobSpec(name, command, out, processes_per_node=processes_per_node, time_limit="00:30:00", **options)


def submit_to_slurm(spec):
    """Submit as a user does: again, while the controller is away."""
    for _ in range(20):
        with contextlib.suppress(slurm.NoAnswer):
            return submit(spec, resubmit=True)
        time.sleep(1)
    return submit(spec, resubmit=True)


def processes(spec) -> list[psutil.Process]:
    """The living processes of a job: by the folder in their arguments, or the name that the local ranks are given."""
    living = []
    for process in psutil.process_iter(["cmdline", "name", "status"]):
        known = spec.out in (process.info["cmdline"] or []) or process.info["name"].startswith(f"{spec.name} ")
        living += [process] if known and process.info["status"] != psutil.STATUS_ZOMBIE else []
    return living


def is_launcher(process) -> bool:
    """Whether a process starts ranks, and is none."""
    words = process.cmdline()
    return bool(words) and (Path(words[0]).name == "srun" or "torch.distributed.run" in words)


def left_by(out) -> str:
    """What a run has left, bit for bit, as a text: its metrics without what is measured, its last checkpoint."""
    folder = paths.root() / out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]
    state = checkpoint.read(checkpoint.newest(folder)) | {"tensors": checkpoint.tensors(checkpoint.newest(folder))}
    del state["epoch_steps"]  # the rows of the current epoch once more, with their times
    del state["checksums"]  # the files may hold the tensors in another order
    rows = [row for row in kept if row["event"] in ("step", "epoch")]
    return json.dumps([rows, state], default=torch.Tensor.tolist, sort_keys=True)


def restart_controllers(cluster, over, counts):
    """Let Slurm's controller be away for some seconds, every two minutes."""
    while not over.wait(120):
        with CLUSTER:
            cluster.end("slurmctld")
            time.sleep(4)
            cluster.start_controller()
        counts["controller restarts"] += 1


def start_here(spec):
    """Start a job on this machine, though a Slurm is in reach."""
    return start(spec, load_site("generic"), None, make_folder(spec))


def run_reference(case):
    """Run a case without trouble, once."""
    out = f"runs/reference/{case}"
    with REFERENCES[case]:
        if not (paths.root() / out / "summary.json").exists():
            state = start_here(spec_of(case, out, "reference")).wait(BOUND)
            assert state == "done", (case, state)


def main() -> int:
    """Run the soak; print its counts."""
    args = lives.read_arguments()
    counts, over = collections.Counter(dict.fromkeys(ZERO, 0)), threading.Event()
    folder = tempfile.mkdtemp(prefix="mpdemo-soak-")
    with Cluster.up(nodes=3, cpus=int(CPUS), urgent=True) as cluster:
        shutil.copytree(paths.root() / "slurm/sites", Path(folder) / "slurm/sites")
        os.environ |= cluster.environ | {"MPDEMO_ROOT": folder, "MPDEMO_SITE": "throwaway"}
        os.chdir(folder)
        restarts = threading.Thread(target=restart_controllers, args=(cluster, over, counts))
        restarts.start()
        lives.live(lambda number, dice: Life(number, dice, counts, cluster), args, counts)
        over.set()
        restarts.join()
    return lives.report(counts, ZERO, folder)


if __name__ == "__main__":
    sys.exit(main())
