"""Trainings that are killed, cancelled, warned and requeued at random, for a given time: nothing may be lost.

    make soak                                    # 30 minutes, on a throw-away Slurm and on this machine
    python tests/soak.py --minutes 5 --seed 3
    python tests/soak.py --kills 100             # processes of trainings on this machine alone

Each life is one training of `CASES`. It is submitted with ``--resume auto``, troubled at a random moment, submitted
again by the same command, and so on. At the end its losses, epochs, weights and optimizer must be, bit for bit, those
of the same training that nobody troubled. Meanwhile the cluster's controller is restarted now and then. Exit status 1:
one of the counts that must be 0 is not.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

from mpdemo import paths
from mpdemo.cluster import Cluster
from mpdemo.errors import UserError
from mpdemo.jobs import Job, JobSpec, load_site, local_job, slurm, submit, train_command
from mpdemo.jobs.record import prepared, read_text, write_record
from mpdemo.training import checkpoint

STEPS = 24
COMMON = {"model": "transformer", "batch_size": 32, "steps": STEPS, "log_every": 1, "resume": "auto"}
COMMON |= {"checkpoint_every": 2, "optimizer": "adamw", "warmup_steps": 4}
CASES = {  # settings, and processes
    "single": ({"rung": "single"}, 1),
    "data_parallel": ({"rung": "data_parallel", "devices": 2}, 1),
    "ddp": ({"rung": "ddp"}, 2),
    "ddp, accumulated": ({"rung": "ddp", "microbatches": 2}, 2),
    "model_parallel": ({"rung": "model_parallel"}, 2),
    "gpipe": ({"rung": "pipeline", "microbatches": 4, "schedule": "GPipe"}, 2),
    "1f1b": ({"rung": "pipeline", "microbatches": 4}, 2),
    "interleaved-1f1b": ({"rung": "pipeline", "microbatches": 4, "schedule": "Interleaved1F1B"}, 2),
    "interleaved-zero-bubble": ({"rung": "pipeline", "microbatches": 4, "schedule": "InterleavedZeroBubble"}, 2),
    "zbv": ({"rung": "pipeline", "microbatches": 4, "schedule": "ZBVZeroBubble"}, 2),
    "one-process pipeline": ({"rung": "pipeline", "form": "one-process", "microbatches": 4, "devices": 2}, 1),
    "fsdp": ({"rung": "fsdp"}, 2),
    "tensor": ({"rung": "tensor"}, 2),
    "hybrid": ({"rung": "hybrid", "replicas": 2, "microbatches": 2}, 4),
}
CLUSTER = threading.Lock()  # of what starts and stops its daemons
REQUEUED = ("warn", "limit", "requeue", "preempted", "node")  # troubles after which a job may start again by itself
NOT_REQUEUED = ("stopped", "failed", "node_failure")  # how it ends instead, where the controller is away just then
REFERENCES = collections.defaultdict(threading.Lock)  # by case
CPUS = "4"  # of each node
BOUND = 240  # seconds that a job may take, start and all; longer is a hang
KILLS = ("rank", "launcher", "supervisor")  # troubles that are a SIGKILL to one process of this machine
ZERO = ("hangs", "wrong states", "orphans", "lost steps", "unequal lives", "errors")  # counts that must be 0


class Life:
    """One training, from its first submission to its end, with troubles on the way."""

    def __init__(self, number, dice, counts, cluster, kills_alone):
        self.dice, self.counts, self.cluster = dice, counts, cluster
        self.case = dice.choice(list(CASES))
        self.kills_alone = kills_alone
        self.by_slurm = dice.random() < 0.7 and not kills_alone
        self.troubles = dice.randint(1, 3)
        self.spec = spec_of(self.case, f"runs/soak/{number}", requeue=self.by_slurm and dice.random() < 0.4)
        self.what = f"life {number} ({self.case}, {'Slurm' if self.by_slurm else 'here'})"

    def live(self):
        """Submit until the training is done; then compare it."""
        state = ""
        while state != "done":
            self.counts["resumed"] += bool(checkpoint.in_order(paths.root() / self.spec.out / "checkpoints"))
            self.counts["submissions"] += 1
            job = submit_to_slurm(self.spec) if self.by_slurm else submit_here(self.spec)
            allowed = self.trouble(job) if self.troubles > 0 else {"done"}
            try:
                state = job.wait(BOUND, pending=BOUND)
            except TimeoutError:
                self.fault("hangs", f"job {job.id} is still {job.state}")
                job.cancel()
                return
            if state not in allowed:
                self.fault("wrong states", f"{state} ({job.reason}), not {allowed}: {job.log()[-600:]}")
                return
            self.counts["not requeued"] += state in NOT_REQUEUED and allowed.issuperset(NOT_REQUEUED)
            self.look_for_orphans()
        self.compare()

    def trouble(self, job) -> set:
        """Wait for a random moment and make trouble; return the states in which the job may end."""
        self.troubles -= 1
        kinds = {"rank": {"failed"}, "launcher": {"failed"}, "cancel": {"cancelled"}, "warn": {"stopped"}}
        if self.by_slurm:
            kinds |= {"job": {"cancelled", "failed"}, "preempted": {"cancelled"}, "node": {"node_failure"}}
            kinds["limit"] = {"stopped"}
            kinds |= {"requeue": set()} if self.spec.requeue else {}
        else:
            kinds["supervisor"] = {"cancelled"}
            del kinds["launcher"]
        if self.kills_alone:
            kinds = {kind: kinds[kind] for kind in KILLS}
        kind = self.dice.choice(list(kinds))
        self.wait_for_a_moment(job)
        if job.state != "running":
            return {"done"}
        with contextlib.suppress(psutil.NoSuchProcess, UserError, IndexError):
            self.make(kind, job)
            self.counts[f"trouble: {kind}"] += 1
        if self.spec.requeue and kind in REQUEUED:
            start_again_at_once(job)
            return {"done", *NOT_REQUEUED}
        return kinds[kind] | {"done"}

    def make(self, kind, job):
        """Make one kind of trouble; a process that has just ended cannot be troubled."""
        if kind == "rank":
            self.dice.choice(processes(self.spec, ranks=True)).kill()
        elif kind == "launcher":
            self.dice.choice(processes(self.spec, ranks=False) or processes(self.spec, ranks=True)).kill()
        elif kind == "supervisor":
            psutil.Process(int(job.id)).kill()
        elif kind == "cancel":
            job.cancel()
        elif kind == "warn":
            job.warn()
        elif kind == "job":
            slurm.client("scancel", "--signal=KILL", job.id)
        elif kind == "preempted":
            slurm.client("sbatch", "-p", "urgent", "-w", node_of(job), "-c", CPUS, "-o", "/dev/null", "--wrap=sleep 2")
        elif kind == "node":
            node = node_of(job)
            with CLUSTER:
                self.cluster.kill_node(node)
                slurm.client("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
                self.cluster.start_node(node)
                until(lambda: slurm.client("sinfo", "-h", "-n", node, "-o", "%T").strip() in ("idle", "allocated"), 30)
        elif kind == "limit":  # Slurm looks every 30 s, and warns when 60 s are left
            slurm.client("scontrol", "update", f"jobid={job.id}", "EndTime=now+45")
            until(lambda: job.state != "running", 40)
        else:
            slurm.client("scontrol", "requeue", job.id)

    def wait_for_a_moment(self, job):
        """Wait until the job runs, then for some of its first seconds, for some step, or for a write that goes on."""
        until(lambda: job.state != "pending", 120)
        how = self.dice.choice(["start", "step", "step", "write"])
        step, out = self.dice.randint(1, STEPS - 1), paths.root() / self.spec.out
        if how == "start":
            time.sleep(self.dice.uniform(0, 10))
        elif how == "step":
            until(lambda: job.finished or len(job.metrics()) > step, 120)
            time.sleep(self.dice.uniform(0, 0.3))
        else:
            time.sleep(self.dice.uniform(0, 6))
            until(lambda: job.finished or is_written(out / "checkpoints"), 20, pause=0.002)

    def look_for_orphans(self):
        """Five seconds after the end no process of the job may be there."""
        if not until(lambda: processes(self.spec) == [], 5):
            self.fault("orphans", str([process.cmdline()[:6] for process in processes(self.spec)]))
            for process in processes(self.spec):
                process.kill()

    def compare(self):
        """Compare everything the training has left with the undisturbed one."""
        self.counts["lives"] += 1
        run_reference(self.case)
        done, reference = left_by(self.spec.out), left_by(f"runs/reference/{self.case}")
        lost = len(reference["rows"]) - len(done["rows"])
        if lost:
            self.fault("lost steps", f"{lost} rows")
        if done["rows"] != reference["rows"] or not same(done["state"], reference["state"]):
            self.fault("unequal lives", f"see {paths.root() / self.spec.out}")

    def fault(self, kind, text):
        self.counts[kind] += 1
        print(f"{kind}: {self.what}: {text}", flush=True)


def spec_of(case, out, requeue=False) -> JobSpec:
    settings, processes_per_node = CASES[case]
    command = train_command(**COMMON, **settings, out=out)
    options = {"requeue": requeue, "signal": "USR1@60", "oversubscribe": True, "gpus_per_process": 0}
    options["cpus_per_process"] = int(CPUS) // processes_per_node  # a node for each job: what hits one hits no other
    return JobSpec("soak", command, out, processes_per_node=processes_per_node, time_limit="00:30:00", **options)


def node_of(job) -> str:
    return slurm.client("squeue", "-h", "-j", job.id, "-o", "%N").strip()


def start_again_at_once(job):
    """Slurm lets a requeued job wait for two minutes; nobody learns anything from that here."""
    until(lambda: job.state == "pending" or job.finished, 40)
    with contextlib.suppress(slurm.SlurmError):
        slurm.client("scontrol", "update", f"jobid={job.id}", "starttime=now")


def submit_to_slurm(spec):
    """Submit as a user does: again, while the controller is away."""
    end = time.monotonic() + 60
    while True:
        try:
            return submit(spec, resubmit=True)
        except slurm.NoAnswer:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def submit_here(spec):
    """Start a job on this machine although there is a Slurm."""
    with prepared(spec) as out:
        started = local_job.start(spec, load_site("generic"))
    facts = {"where": "this machine", "script": "none", "spec": dataclasses.asdict(spec), "submitted": time.time()}
    write_record(out, started | facts)
    return Job(started | facts, out)


def processes(spec, ranks=None) -> list[psutil.Process]:
    """The living processes of a job, by the folder in their arguments: all, its ranks, or its launchers."""
    living = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if spec.out in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            is_rank = Path(words[0]).name != "srun" and "torch.distributed.run" not in words
            living += [process] if ranks in (None, is_rank) else []
    return living + (forked(spec) if ranks in (None, True) else [])


def forked(spec) -> list[psutil.Process]:
    """The living ranks of a local job: their command line is that of the process that forked them."""
    numbers = map(int, read_text(paths.root() / spec.out / local_job.RANKS).split())
    living = []
    for number in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(number)
            if "mpdemo.world.warm" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def until(condition, seconds, pause=0.05) -> bool:
    """Wait for a condition, at most so many seconds; return whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def is_written(folder) -> bool:
    """Whether a checkpoint is being written: a folder without its name."""
    return any(folder.glob("*.tmp"))


def left_by(out) -> dict:
    """The rows of a run's metrics without times, and its last checkpoint."""
    folder = paths.root() / out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k not in ("time", "images_per_second", "peak_memory_mib")} for row in rows]
    kept = [row for row in kept if row["event"] in ("step", "epoch")]
    state = checkpoint.read(checkpoint.newest(folder))
    del state["epoch_steps"]  # the rows of the current epoch once more, with their times
    del state["checksums"]  # the files may hold the tensors in another order
    state["tensors"] = checkpoint.tensors(checkpoint.newest(folder))
    return {"rows": kept, "state": state}


def same(one, other) -> bool:
    """Whether two states are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def restart_controllers(cluster, over, counts):
    """Let Slurm's controller be away for some seconds, every two minutes."""
    while not over.wait(120):
        with CLUSTER:
            cluster.stop_controller()
            time.sleep(4)
            cluster.start_controller()
        counts["controller restarts"] += 1


def run_reference(case):
    """Run a case without trouble, once."""
    with REFERENCES[case]:
        if not (paths.root() / f"runs/reference/{case}/summary.json").exists():
            state = submit_here(spec_of(case, f"runs/reference/{case}")).wait(BOUND)
            assert state == "done", (case, state)


def run_lives(worker, args, end, counts, cluster):
    """Live one life after the other, every `at_once`-th of all, until the time is over or the kills are made."""
    for number in itertools.count(worker, args.at_once):
        kills = sum(counts[f"trouble: {kind}"] for kind in KILLS)
        if kills >= args.kills if args.kills else time.monotonic() > end:
            return
        try:
            Life(number, random.Random(f"{args.seed} {number}"), counts, cluster, args.kills > 0).live()
        except Exception as error:
            counts["errors"] += 1
            print(f"error in life {number}: {type(error).__name__}: {error}", flush=True)


def main() -> int:
    """Run the soak; print its counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kills", type=int, default=0, help="kill this often, on this machine alone; then end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    args = parser.parse_args()
    counts, over, started = collections.Counter(dict.fromkeys(ZERO, 0)), threading.Event(), time.monotonic()
    folder, wanted = tempfile.mkdtemp(prefix="mpdemo-soak-"), {"urgent": ["urgent"]}
    with Cluster.up(nodes=3, cpus=int(CPUS), wanted=wanted, owned=True) as cluster:
        shutil.copytree(paths.root() / "slurm/sites", Path(folder) / "slurm/sites")
        os.environ |= cluster.environ | {"MPDEMO_ROOT": folder, "MPDEMO_SITE": "throwaway"}
        os.chdir(folder)
        restarts = threading.Thread(target=restart_controllers, args=(cluster, over, counts))
        restarts.start()
        with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
            more = [args, started + 60 * args.minutes, counts, cluster]
            list(pool.map(lambda worker: run_lives(worker, *more), range(args.at_once)))
        over.set()
        restarts.join()
    counts["minutes"] = round((time.monotonic() - started) / 60)
    print(json.dumps(counts, indent=1, sort_keys=True))
    if any(counts[kind] for kind in ZERO):
        print(f"the runs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
