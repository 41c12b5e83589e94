"""The clues: what each tool says of the job at the moment of the page, as text. All are gathered at once."""

import difflib
import json
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import torch

from mpdemo.labs.on_call.job import RANKS
from mpdemo.world.processes import child_environment

LAST_WEEK = json.loads(Path(__file__).with_name("last_week.json").read_text())  # the mean loss of each step
NO_GPU = "(recorded: this machine has no GPU)\ndmesg: no line with NVRM; nvidia-smi: all 8 GPUs, no ECC errors"


def gather(job):
    """Return the text of every clue, by name. The log comes before the stacks, which are written into it."""
    first = ("state", "log", "explain", "stacks", "recorder")
    names = [*first, *(name for name in CLUES if name not in first)]
    said = {name: CLUES[name](job).replace(f"{job.out}/", "") for name in names}
    return {name: said[name] for name in CLUES}


def log(job):
    text = job.log.read_text(errors="replace") if job.log.exists() else ""
    text = re.sub(r'(?m)^.*File "<frozen .*\n', "", text)
    text = re.sub(
        r'(?m)^.*File "\S*(/lib/python3|/on_call/job.py).*\n.*\n(.*\^\^\^+\n)?', "", text
    )  # not the job's own
    dull = re.compile(r"\d: *$|\^\^\^|Extension modules")
    lines = [re.sub(r"\[rank\d\]: ", "", line)[:220] for line in text.splitlines() if not dull.search(line)]
    return "\n".join(lines[:20] + ["..."] * (len(lines) > 60) + lines[20:][-40:])


def stacks(job):
    """Two dumps, so that one sees what moves."""
    return "\n".join(line for when in ("now", "a moment later") for line in (f"{when}:", *_dump_stacks(job)))


def _dump_stacks(job):
    size = job.log.stat().st_size if job.log.exists() else 0
    for rank in job.pids():
        job.send(rank, signal.SIGUSR2)

    def text():
        return job.log.read_bytes()[size:].decode(errors="replace") if job.log.exists() else ""

    _wait(lambda: all(re.search(rf"(?m)^ *{rank}: .* in <module>", text()) for rank in job.pids()))
    text = text()
    for rank in RANKS:
        blocks = re.split(rf"(?m)^ *{rank}: (?:Current thread|Thread|Stack).*$", text)
        frames = re.findall(rf'^ *{rank}:   File "(\S+)", line (\d+) in (\S+)', blocks[-1], re.M)
        named = [
            f"{function} ({Path(file).name}:{line})" for file, line, function in frames if "c10d_logger" not in file
        ]
        own = " < ".join(f for i, f in enumerate(named) if not i or "train.py" in f and "<module>" not in f)
        silent = "no answer: its process is there" if rank in job.pids() else "no process"
        yield f"rank {rank}: {own or silent}"


def _wait(ready, seconds=6):
    """Wait until every rank has answered a signal, or for some seconds: one may stand still."""
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.3)  # for the end of what it writes


def state(job):
    return job.in_words()


def common_steps(job):
    """Return the numbers of the steps that all ranks have written down: an array of rank, step and column."""
    rows = [job.rows(rank) for rank in RANKS]
    least = min(map(len, rows))
    return np.stack([row[:least] for row in rows]) if least else np.empty((len(rows), 0, 8))


def loss(job):
    """The mean loss over the ranks, beside last week's."""
    if not (rows := common_steps(job)).size:
        return "no step"
    first = int(rows[0, 0, 0])
    mean, week = rows[:, :, 3].mean(0), LAST_WEEK[first - 1 :]
    lines = [f"from step {first}, means of 6 steps", f"this run: {_sixes(mean)}", f"last week: {_sixes(week)}"]
    return "\n".join(lines)


def _sixes(values):
    return " ".join(f"{np.mean(values[i : i + 6]):.2f}" for i in range(0, len(values), 6))


def losses(job):
    """Each rank's own loss, before the all-reduce: the first steps, and those before the end or the first NaN."""
    if not (rows := common_steps(job)).size:
        return "no step"
    table = rows[:, :, 3].T
    odd = np.flatnonzero(~np.isfinite(table).all(1))
    at = int(odd[0]) if len(odd) else len(table) - 1
    shown = range(max(0, at - 2), min(len(table), at + 2))
    lines = [f"step {rows[0, i, 0]:.0f}: {_by_rank(table[i])}" for i in shown]
    return "\n".join([*lines, f"mean of the first 10 steps: {_by_rank(table[:10].mean(0))}"])


def _by_rank(values):
    return ", ".join(f"rank {rank} {value:.3f}" for rank, value in enumerate(values))


def times(job):
    lines = []
    for rank in RANKS:
        rows = job.rows(rank)
        ms = np.median(rows[len(rows) // 4 :, 4:7], 0) * 1000 if len(rows) else [np.nan] * 3
        parts = f"load {ms[0]:.1f}, compute {ms[1]:.1f} (CPU time), all-reduce {ms[2]:.1f} ms"
        lines.append(f"rank {rank}: {len(rows)} steps; {parts}")
    return "\n".join(lines)


def recorder(job):
    """The last two collectives of each rank, and who comes last to the others."""
    for rank in job.pids():
        job.send(rank, signal.SIGUSR1)
    _wait(lambda: all((job.out / f"recorder_{rank}").exists() for rank in job.pids()))
    dumps = {rank: dump["entries"] for rank, dump in dumps_of(job).items()}
    lines = [f"rank {rank}: no dump" for rank in RANKS if rank not in dumps]
    lines += [f"rank {rank}: last calls: {'; '.join(map(_call, entries[-2:]))}" for rank, entries in dumps.items()]
    moments = [{entry["collective_seq_id"]: entry["time_created_ns"] for entry in dump} for dump in dumps.values()]
    common = sorted(set.intersection(*map(set, moments)))[10:] if len(moments) == 4 else []
    if common:
        late = Counter(max(RANKS, key=lambda rank: moments[rank][number]) for number in common)
        lines.append("came last: " + ", ".join(f"rank {rank} in {late[rank] / len(common):.0%}" for rank in RANKS))
    return "\n".join(lines)


def dumps_of(job):
    """Return the flight recorder of each rank that has written one."""
    files = {rank: job.out / f"recorder_{rank}" for rank in RANKS}
    return {rank: readable(pickle.loads(file.read_bytes())) for rank, file in files.items() if file.exists()}


def readable(dump):
    """Return a recorder of gloo's as torchfrtrace reads NCCL's: with the group's ranks, and NCCL's names of calls."""
    dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    for entry in dump["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
    return dump


def curves(job):
    """Return what the pictures of the losses show: the first step, each rank's losses, and last week's mean."""
    if not (rows := common_steps(job)).size:
        return {}
    first = int(rows[0, 0, 0])
    return {"first": first, "ranks": rows[:, :, 3].tolist(), "last week": LAST_WEEK[first - 1 :]}


def _call(entry):
    sizes = (entry["input_sizes"] or [[]])[0]
    return f"{entry['collective_seq_id']} {entry['profiling_name'][5:]} {sizes}"


def node(job):
    lines = []
    for number in (1, 2):
        words = ["df", "--output=size,avail,pcent", "-B1M", job.out / f"node{number}"]
        _, free, used = subprocess.check_output(words, text=True).split()[-3:]
        pids = job.pids()
        states = [
            f"rank {rank} {psutil.Process(pids[rank]).status() if rank in pids else 'no process'}"
            for rank in (2 * number - 2, 2 * number - 1)
        ]
        lines.append(f"node {number}: own disk {used} used, {free} MB free; {', '.join(states)}")
    return "\n".join(lines)


def files(job):
    lines = []
    for file in sorted([*job.out.glob("node*/*"), *job.out.glob("data/train*")]):
        what = images_in(file) if file.suffix == ".npz" else checkpoint_in(file)
        lines.append(f"{file.relative_to(job.out)}: {file.stat().st_size / 1000:.0f} kB, {what}")
    return "\n".join(lines)


def images_in(file):
    images = np.load(file)["images"]
    return f"images {images.shape} {images.dtype}"


def checkpoint_in(file):
    try:
        state = torch.load(file)
    except Exception as error:
        return f"torch.load: {error!r}"[:80]
    norm = sum(weight.float().pow(2).sum() for weight in state["model"].values()).item()
    return f"step {state['step']}, norm^2 of the weights {norm:.1f}"


def gpu(job):
    return job.gpu_text or NO_GPU


def order(job):
    lines = []
    for rank in RANKS:
        rows = job.rows(rank)
        firsts = [rows[rows[:, 1] == e][:4, 2].astype(int).tolist() if len(rows) else [] for e in range(3)]
        said = ", ".join(f"epoch {epoch} {samples}" for epoch, samples in enumerate(firsts) if samples)
        lines.append(f"rank {rank}, first sample of the first batches: {said}")
    return "\n".join(lines)


def weights(job):
    if not (rows := common_steps(job)).size:
        return "no step"
    return "\n".join(f"rank {rank}: norm^2 {x[7]:.4f} after step {x[0]:.0f}" for rank, x in enumerate(rows[:, -1]))


def explain(job):
    """What `mpdemo explain` says of the log."""
    words = [sys.executable, "-m", "mpdemo", "explain", job.log]
    env = child_environment() | {"NO_COLOR": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip()


def diff(job):
    before = Path(__file__).with_name("train.py").read_text().splitlines()
    lines = difflib.unified_diff(before, job.program.splitlines(), "last week", "now", n=0, lineterm="")
    return "\n".join(lines)


CLUES = {
    name.__name__: name
    for name in (log, state, loss, stacks, explain, times, losses, recorder, node, files, gpu, order, weights, diff)
}
