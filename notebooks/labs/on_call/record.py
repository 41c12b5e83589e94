"""Start a job with a fault in it, wait for the page, gather all clues, and end the job. `on_call` starts this.

It reads from its input which incident, and writes it to its output, sealed: neither a command line nor the object in
the notebook gives it away.
"""

import base64
import contextlib
import hashlib
import json
import os
import pickle
import signal
import sys

import numpy as np
import torch

from mpdemo.cluster import Cluster
from mpdemo.labs.on_call import clues, faults
from mpdemo.labs.on_call.incidents import INCIDENTS, seal
from mpdemo.labs.on_call.job import STEPS, Job, SlurmJob
from mpdemo.world.processes import PRCTL, SIGNAL_AT_PARENTS_DEATH


def draw(number, slurm=False):
    """Return the kind of incident, and the generator that draws its rank and details."""
    kinds = [kind for kind in INCIDENTS if kind not in (faults.ONLY_LOCAL if slurm else faults.ONLY_SLURM)]
    random = np.random.default_rng(list(hashlib.sha256(f"03:12, {number}".encode()).digest()))
    kind = kinds[int(random.integers(len(kinds)))]
    if kind == "full" and os.geteuid():  # only root mounts a disk
        kind = "requeue"
    return kind, random


def record(kind, random, cluster=None):
    """Run one incident; return its page, its clues, and where the fault is."""
    job = SlurmJob(random, cluster) if cluster else Job(random)
    try:
        where = getattr(faults, kind)(job)
        faults.disguise(job)
        job.start()
        job.wait()
        said = clues.gather(job)
        dumps = {rank: base64.b64encode(pickle.dumps(dump)).decode() for rank, dump in clues.dumps_of(job).items()}
        told = {"page": page(job), "clues": said, "curves": clues.curves(job), "dumps": dumps}
        return told | {"kind": kind, "rank": job.rank, "where": where}
    finally:
        job.close()


def page(job):
    """What the pager says: only what a monitor sees from outside."""
    words = {
        "RUNNING": "has stopped making progress" if job.step else "hasn't begun to train",
        "COMPLETED": "has ended, and its owner says: last week's was faster, or better, or both",
    }
    said = words.get(job.paged, f"has ended as {job.paged}")
    if job.restarts:
        said = f"has been requeued {job.restarts} times and {said}"
    return f"Job {job.id} (digits, 2 nodes, 4 ranks) {said}. Last step: {job.step} of {STEPS}."


def main():
    PRCTL(SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)  # an interrupted cell or a dead kernel ends the job
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(1)  # no threads before the fork
    asked = json.load(sys.stdin)
    kind, random = draw(asked["number"], asked["slurm"])
    with Cluster.up(nodes=2, cpus=2, gpus=0) if asked["slurm"] else contextlib.nullcontext() as cluster:
        incident = record(kind, random, cluster)
    sys.stdout.buffer.write(seal(incident))


if __name__ == "__main__":
    main()
