"""The clues: what each tool says of the job at the moment of the page, as text. All are gathered at once."""

import difflib
import json
import pickle
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import torch

from mpdemo.labs.on_call.incidents import COST
from mpdemo.labs.on_call.job import LAST_WEEK, RANKS

# last week's mean loss of each step
MEANS = json.loads(Path(__file__).with_name("last_week.json").read_text())
NO_GPU = (
    "(recorded: this machine has no GPU)\ndmesg: no line with NVRM; nvidia-smi: all 8 GPUs, no ECC errors"
)
ENDED = "(No process of the job is left. "
ENDED += "Ask state how each one ended, log for their last words, times for what they did.)"


def gather(job):
    """Return the text of every clue, by name."""
    said = {name: globals()[name](job).replace(f"{job.out}/", "") for name in COST}
    if not job.pids():
        said |= {name: f"{said[name]}\n{ENDED}" for name in ("stacks", "node", "gpu")}
    return said


def log(job):
    text = job.log.read_text(errors="replace") if job.log.exists() else ""
    # only the job's own frames stay
    text = re.sub(r'(?m)^.*File "\S*/lib/python3.*\n.*\n(.*\^\^\^+\n)?', "", text)
    lines = [re.sub(r"\[rank\d\]: ", "", line)[:220] for line in text.splitlines()]
    lines = [line for line in lines if not re.search(r"\d: *$|\^\^\^", line)]
    return "\n".join(lines[:20] + ["..."] * (len(lines) > 60) + lines[20:][-40:])


def state(job):
    return f"job {job.id}: {job.state()}, requeued {job.restarts} times; {'; '.join(job.ends())}"


def stacks(job):
    """Two dumps, so that one sees what moves."""
    return "\n".join(
        line for when in ("now", "a moment later") for line in (f"{when}:", *dumped_stacks(job))
    )


def dumped_stacks(job):
    """Let the ranks write their stacks; yield each one's main thread, with the innermost call first."""
    files = [job.out / f"stacks_{rank}" for rank in RANKS]
    for file in files:
        file.write_text("")
    signal_and_wait(job, signal.SIGUSR2, lambda rank: " in <module>" in files[rank].read_text())
    for rank, file in enumerate(files):
        main = re.split(r"(?m)^(?:Current thread|Thread).*$", file.read_text())[-1]
        frames = [
            frame
            for frame in re.findall(r'File "(\S+)", line (\d+) in (\S+)', main)
            if "logger" not in frame[0]
        ]
        named = [f"{function} ({Path(path).name}:{line})" for path, line, function in frames]
        own = named[:1] + [name for name in named[1:] if "train.py" in name and "<module>" not in name]
        silent = "no answer: its process is there" if rank in job.pids() else "no process"
        yield f"rank {rank}: {' < '.join(own) or silent}"


def signal_and_wait(job, sign, answered, seconds=6):
    """Send a signal to all ranks, and wait until every one has answered, or for some seconds: one may stand still."""
    job.send(sign)
    end = time.monotonic() + seconds
    while not all(map(answered, job.pids())) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.3)  # for the end of what it writes


def common_steps(job):
    """Return the numbers of the steps that all ranks have written down: an array of rank, step and column."""
    rows = [job.rows(rank) for rank in RANKS]
    least = min(map(len, rows))
    return np.stack([row[:least] for row in rows]) if least else np.empty((len(rows), 0, 8))


def loss(job):
    """The mean loss over the ranks, beside last week's."""
    if not (lines := curves(job).get("loss")):
        return "no step"
    first = lines["this run"][0]["step"]
    return "\n".join(
        [f"from step {first}, means of 6 steps", *(f"{name}: {sixes(lines[name])}" for name in lines)]
    )


def sixes(points):
    values = [point["loss"] for point in points]
    return " ".join(f"{np.mean(values[i : i + 6]):.2f}" for i in range(0, len(values), 6))


def curves(job):
    """Return the lines of the pictures: the mean loss beside last week's, and each rank's own."""
    if not (rows := common_steps(job)).size:
        return {}
    first = int(rows[0, 0, 0])
    means = {"this run": rows[:, :, 3].mean(0), "last week": MEANS[first - 1 :]}
    own = {f"rank {rank}": values for rank, values in enumerate(rows[:, :, 3])}

    def points(values):
        return [{"step": step, "loss": float(value)} for step, value in enumerate(values, first)]

    pictures = {"loss": means, "losses": own}
    return {
        clue: {label: points(values) for label, values in lines.items()} for clue, lines in pictures.items()
    }


def losses(job):
    """Each rank's own loss, before the all-reduce: the first steps, and those before the end or the first NaN."""
    if not (rows := common_steps(job)).size:
        return "no step"
    table = rows[:, :, 3].T
    odd = np.flatnonzero(~np.isfinite(table).all(1))
    at = int(odd[0]) if len(odd) else len(table) - 1
    shown = range(max(0, at - 2), min(len(table), at + 2))
    lines = [f"step {rows[0, i, 0]:.0f}: {by_rank(table[i])}" for i in shown]
    return "\n".join([*lines, f"mean of the first 10 steps: {by_rank(table[:10].mean(0))}"])


def by_rank(values):
    return ", ".join(f"rank {rank} {value:.3f}" for rank, value in enumerate(values))


def weights(job):
    if not (rows := common_steps(job)).size:
        return "no step"
    return "\n".join(
        f"rank {rank}: norm^2 {x[7]:.4f} after step {x[0]:.0f}" for rank, x in enumerate(rows[:, -1])
    )


def times(job):
    lines = []
    for rank in RANKS:
        rows = job.rows(rank)
        load, compute, reduce = (
            np.median(rows[len(rows) // 4 :, 4:7], 0) * 1000 if len(rows) else [np.nan] * 3
        )
        parts = f"load {load:.1f}, compute {compute:.1f} (CPU time), all-reduce {reduce:.1f} ms"
        lines.append(f"rank {rank}: {len(rows)} steps; {parts}")
    return "\n".join(lines)


def recorder(job):
    """The last two collectives of each rank, and who comes last to the others."""
    signal_and_wait(job, signal.SIGUSR1, lambda rank: (job.out / f"recorder_{rank}").exists())
    dumps = {rank: dump["entries"] for rank, dump in dumps_of(job).items()}
    lines = [f"rank {rank}: no dump" for rank in RANKS if rank not in dumps]
    for rank, entries in dumps.items():
        calls = [
            f"{e['collective_seq_id']} {e['profiling_name'][5:]} {(e['input_sizes'] or [[]])[0]}"
            for e in entries
        ]
        lines.append(f"rank {rank}: last calls: {'; '.join(calls[-2:])}")
    moments = [
        {entry["collective_seq_id"]: entry["time_created_ns"] for entry in dump} for dump in dumps.values()
    ]
    common = sorted(set.intersection(*map(set, moments)))[10:] if len(moments) == 4 else []
    if common:
        late = Counter(max(RANKS, key=lambda rank: moments[rank][number]) for number in common)
        lines.append(
            "came last: " + ", ".join(f"rank {rank} in {late[rank] / len(common):.0%}" for rank in RANKS)
        )
    return "\n".join(lines)


def dumps_of(job):
    """Return the flight recorder of each rank that has written one."""
    files = {rank: job.out / f"recorder_{rank}" for rank in RANKS}
    return {
        rank: readable(pickle.loads(file.read_bytes())) for rank, file in files.items() if file.exists()
    }


def readable(dump):
    """Return a recorder of gloo's as torchfrtrace reads NCCL's: with the group's ranks, and NCCL's names of calls."""
    dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    for entry in dump["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
    return dump


def node(job):
    lines, pids = [], job.pids()
    for number, ranks in (1, (0, 1)), (2, (2, 3)):
        if number == job.lost:
            lines.append(f"node {number}: no answer")
            continue
        words = ["df", "--output=size,avail,pcent", "-B1M", job.out / f"node{number}"]
        _, free, used = subprocess.check_output(words, text=True).split()[-3:]
        states = {
            rank: psutil.Process(pids[rank]).status() if rank in pids else "no process" for rank in ranks
        }
        said = [
            f"rank {rank} {status.replace('stopped', 'stands still')}" for rank, status in states.items()
        ]
        lines.append(f"node {number}: own disk {used} used, {free} MB free; {', '.join(said)}")
    return "\n".join(lines)


def files(job):
    """Data and checkpoints; those of one step stand together, so that one sees where the nodes differ."""
    found = sorted(
        [*job.out.glob("data/train*"), *job.out.glob("node*/*")], key=lambda file: (file.name, file.parent)
    )
    lines = []
    for file in found:
        what = (
            f"images {(x := np.load(file)['images']).shape} {x.dtype}"
            if file.suffix == ".npz"
            else checkpoint(file)
        )
        lines.append(f"{file.relative_to(job.out)}: {file.stat().st_size / 1000:.0f} kB, {what}")
    return "\n".join(lines)


def checkpoint(file):
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


def diff(job):
    before, now = LAST_WEEK.splitlines(), job.program.splitlines()
    return "\n".join(difflib.unified_diff(before, now, "last week", "now", n=0, lineterm=""))
