"""Start a job with a fault in it, wait for the page, gather all clues, and end the job. `on_call` starts this.

It reads from its input which incident, and writes it to its output, sealed: neither a command line nor the object in
the notebook gives it away.
"""

import base64
import hashlib
import json
import os
import pickle
import signal
import sys

import numpy as np
import torch

from mpdemo.labs.on_call import clues, faults
from mpdemo.labs.on_call.incidents import INCIDENTS, seal
from mpdemo.labs.on_call.job import STEPS, Job
from mpdemo.world.processes import PRCTL, SIGNAL_AT_PARENTS_DEATH, clean_up_on_signals


def draw(number):
    """Return the kind of incident, and the generator that draws its rank and details."""
    kinds = [
        kind for kind in INCIDENTS if kind != "node_dies"
    ]  # one in 13 is this one; the others keep their numbers
    random = np.random.default_rng(list(hashlib.sha256(f"03:12, {number}".encode()).digest()))
    kind = kinds[int(random.integers(len(kinds)))]
    if number % 13 == 0:
        return "node_dies", random
    return "requeue" if kind == "full" and os.geteuid() else kind, random  # only root mounts a disk


def record(kind, random):
    """Run one incident; return its page, its clues, and which it is."""
    job = Job(random)
    try:
        getattr(faults, kind)(job)
        faults.disguise(job)
        told = {"kind": kind, "rank": job.rank, "page": page(job, job.run()), "clues": clues.gather(job)}
        dumps = {
            rank: base64.b64encode(pickle.dumps(dump)).decode()
            for rank, dump in clues.dumps_of(job).items()
        }
        return told | {"curves": clues.curves(job), "dumps": dumps}
    finally:
        job.close()


def page(job, state):
    """What the pager says: only what a monitor sees from outside."""
    complaint = "has ended, and its owner says: last week's was faster, or better, or both"
    said = {"RUNNING": "is running, and has made no progress for a while", "COMPLETED": complaint}
    requeued = f"has been requeued {job.restarts} times and " if job.restarts else ""
    saved = max([0, *(int(file.stem.removeprefix("step")) for file in job.out.glob("node*/step*"))])
    words = requeued + said.get(state, "has failed")
    return f"Job {job.id} (digits, 2 nodes, 4 ranks) {words}. Last checkpoint: step {saved} of {STEPS}."


def main():
    PRCTL(SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)  # an interrupted cell or a dead kernel ends the job
    clean_up_on_signals()
    torch.set_num_threads(1)  # no threads before the fork
    asked = json.load(sys.stdin)
    sys.stdout.buffer.write(seal(record(*draw(asked["number"]))))


if __name__ == "__main__":
    main()
