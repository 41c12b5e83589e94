"""Ask the ranks of a running job where they are: ``explain --live``.

Each node of the job is asked by `mpdemo.tools.explain.probe`. What a rank that was asked by SIGUSR2 answers is in the
job's log. Taught in notebooks/61_hang.ipynb.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from mpdemo.errors import UserError
from mpdemo.jobs import slurm
from mpdemo.ranks.places import FRAME
from mpdemo.tools.explain import probe
from mpdemo.tools.explain.who_waits import Place, place_of

START = 1.0  # s in which the probes start
TASK = re.compile(r"^ *(\d+): ")  # srun --label
BEGINS = re.compile(r"^(?:Current thread 0x|Stack \(most recent)")
OF_STACKS = re.compile(r"^(?:Current thread|Thread|Stack|  File|  \.\.\.|\s*$)")
OTHER_THREAD = re.compile(r"^Thread 0x")


def look_at(job_id, logs) -> tuple[list[Place], list]:
    """Return where the ranks of a Slurm job are, and its GPUs: (percent, MiB) of each."""
    before = {file: file.stat() for file in logs}
    sizes = {str(file): old.st_size for file, old in before.items()}
    # behind the name of another cluster
    counts = slurm.client("squeue", "-h", "-o", "%D", "-j", job_id).split()
    nodes = counts[-1] if counts else 1  # it has just ended, as srun says
    words = [
        "srun",
        f"--jobid={slurm.number(job_id)}",
        "--overlap",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
    ]
    words += ["--ntasks-per-node=1", "--input=none", sys.executable, "-c", Path(probe.__file__).read_text()]
    try:
        said = slurm.run(*words, slurm.number(job_id), str(time.time() + START), json.dumps(sizes))
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the nodes of job {job_id} do not answer; is one of them down? see: sinfo -R"
        ) from None
    rows = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
    if not rows:
        reason = (said.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"cannot look at the nodes of job {job_id}: {reason}")
    gpus = [gpu for row in rows for gpu in row.get("gpus", ())]
    text = "".join(row.get("log", "") for row in rows)
    found = [row for row in rows if "rank" in row]
    return places(found, max((row["world"] for row in found), default=0), text, before), gpus


def look_here(ranks, logs) -> tuple[list[Place], list]:
    """Return the same of processes on this machine: rank -> process."""
    before = {file: file.stat() for file in logs}
    found = [row for rank, pid in sorted(ranks.items()) if (row := probe.look(rank, pid))]
    time.sleep(probe.SETTLE)
    text = probe.new_text({file: old.st_size for file, old in before.items()})
    return places(found, len(ranks), text, before), probe.gpus()


def places(rows, world, text, before) -> list[Place]:
    """Return the place of each rank, by what the probes found and the text that the ranks wrote into the logs."""
    if text and all(OF_STACKS.match(TASK.sub("", line)) for line in text.splitlines()):
        for file, old in before.items():  # stacks alone are no sign of life: the logs keep their old times
            with contextlib.suppress(OSError):
                os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assign(stacks_in(text), sorted((row for row in rows if row["asked"]), key=lambda row: row["rank"]))
    found = {row["rank"]: place_of(row) for row in rows}
    return [found.get(rank, Place(rank)) for rank in sorted({*range(world), *found})]


def assign(stacks, asked):
    """Give each rank its stack: those of one task (a rank, or a torchrun) came in the order in which it was asked."""
    labelled = any(stacks)  # without labels, the stacks of all tasks came in that order
    for task in {row["task"] for row in asked} if labelled else [""]:
        of_task = [row for row in asked if row["task"] == task or not labelled]
        found = stacks.get(task, [])
        if len(found) == len(of_task):
            for row, frames in zip(of_task, found, strict=True):
                row["frames"] = frames


def stacks_in(text) -> dict:
    """Return the stacks that faulthandler wrote into a log: label of the task -> frames of each, in order."""
    stacks, open_ones = {}, {}
    for line in text.splitlines():
        label = match[1] if (match := TASK.match(line)) else ""
        line = TASK.sub("", line)
        if BEGINS.match(line):
            open_ones[label] = []
            stacks.setdefault(label, []).append(open_ones[label])
        elif OTHER_THREAD.match(line):
            open_ones[label] = []  # not kept
        elif label in open_ones and (match := FRAME.match(line)):
            open_ones[label].append((match[1], int(match[2]), match[3]))
    return stacks
