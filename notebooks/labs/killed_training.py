"""Kill a training run at random, again and again, and write down what each failure costs.

    python -m mpdemo.labs.killed_training runs/55_killed         a save after every 10 steps, 4 kills
    python -m mpdemo.labs.killed_training runs/55_killed 40 60   a save after every 40 steps, 60 kills

Two ranks train over gloo and save as they go. At random times, on average every `BETWEEN` seconds, one of them gets a
SIGKILL, the other one ends because it has lost its partner, and both are started anew and resume. The life after the
last kill ends with its first save. Then the same steps run once more, with neither kill nor save. ``summary.json`` has
the seconds of a step, of each save, each life and each restart, the steps that each kill cost, the time lost up to the
restart after the last kill, and whether both runs ended with the same weights. This process has imported
PyTorch and computes nothing itself before the last fork, so it forks the ranks, and a restart is short
here. Taught in notebooks/55_how_often.ipynb.
"""

import json
import math
import os
import random
import shutil
import sys
import time
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch
import torch._dynamo  # by every optimizer; here once, before the forks
import torch.distributed as dist

from mpdemo.world.processes import be_killed_with_parent, end, lost_a_peer

RANKS, WIDTH, PAUSE = 2, 640, 0.02  # the pause in each step, in s, stands for a larger model
BETWEEN = 1.0  # s of training from one failure to the next, on average
PATIENCE = 120.0  # s for a run without a kill
ENDLESS = 10**9  # steps of a life that will be killed, and before the first save of a run that makes none


def train(rank, folder, life, steps, every):
    """Train from the newest checkpoint to the last step (None: to the next save); rank 0 writes when each was done."""
    be_killed_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{life}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    optimizer, first, path = torch.optim.AdamW(model.parameters()), 0, folder / "last.pt"
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["steps"]
    steps = steps or first + every
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    path_of_log = os.devnull if rank else folder / f"life-{life}.txt"
    with open(path_of_log, "a", buffering=1) as log:  # each line is out before the next step
        for done in range(first + 1, steps + 1):
            inputs = torch.randn(RANKS, 8, WIDTH, generator=torch.Generator().manual_seed(done))[rank]
            optimizer.zero_grad()
            (ddp(inputs) - inputs).square().mean().backward()
            optimizer.step()
            time.sleep(PAUSE)
            print(time.time(), "step", done, file=log)
            if done % every == 0:
                if rank == 0:
                    save(
                        {"steps": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
                        path,
                    )
                dist.barrier()  # all wait for the save: that is its cost
                print(time.time(), "saved", done, file=log)
    if rank == 0:
        save(model.state_dict(), folder / "end.pt")
    dist.barrier()


def train_until_alone(*arguments):
    """Train; end without a traceback when the other rank is gone."""
    try:
        train(*arguments)
    except RuntimeError as error:
        if not lost_a_peer(error):
            raise
        end(1)


def save(state, path):
    """Write a checkpoint whole or not at all."""
    with open(part := path.with_suffix(".tmp"), "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    part.replace(path)


def live(context, folder, life, job, seconds):
    """Start the ranks, kill one after some seconds of training (None: not at all); return when, and what they wrote."""
    arguments = [(rank, folder, life, *job) for rank in range(RANKS)]
    ranks = [context.Process(target=train_until_alone, args=own, daemon=True) for own in arguments]
    for rank in ranks:
        rank.start()
    log, until = folder / f"life-{life}.txt", time.monotonic() + PATIENCE
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.005)
    ranks[0].join(PATIENCE if seconds is None else seconds)
    now, victim = time.time(), random.choice(ranks)
    victim.kill()  # one that has ended by itself doesn't mind
    for rank in ranks:
        rank.join(PATIENCE)
    lines = [line.split() for line in log.read_text().splitlines()]
    return now, [(float(when), what, int(done)) for when, what, done in lines]


def lives(folder, every, kills=0, steps=None) -> list:
    """Let a run die so often and then do these steps (None: until its next save); return its lives."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context, rows = get_context("fork"), []
    for life in range(kills):
        rows.append(live(context, folder, life, (ENDLESS, every), random.expovariate(1 / BETWEEN)))
    rows.append(live(context, folder, kills, (steps, every), None))
    assert (folder / "end.pt").exists(), f"a run without a kill hasn't reached its end in {PATIENCE:g} s"
    return rows


def main(out, every=10, kills=4):
    """Train with kills and without, and write what was measured."""
    random.seed(3)
    out, every = Path(out).resolve(), int(every)
    died = lives(out / "killed", every, int(kills))
    lives(out / "whole", ENDLESS, steps=died[-1][1][-1][2])
    ends = [torch.load(out / name / "end.pt").values() for name in ("killed", "whole")]
    pairs = [pair for _, events in died for pair in pairwise(events)]
    times, saves = ([b[0] - a[0] for a, b in pairs if b[1] == what] for what in ("step", "saved"))
    # the lives that were killed, with restarts
    (begin, _, first), (until, _, resumed) = died[0][1][0], died[-1][1][0]
    row = {
        "step": mean(times),
        "saves": saves,
        "between": mean(now - events[0][0] for now, events in died[:-1]),
        "kills": [
            {"reached": events[-1][2], "resumed": later[0][2], "restart": later[0][0] - now}
            for (now, events), (_, later) in pairwise(died)
        ],
        "overhead": (until - begin) / (resumed - first) / mean(times) - 1 if resumed > first else math.inf,
        "same": all(map(torch.equal, *ends)),
    }
    (out / "summary.json").write_text(json.dumps(row))


if __name__ == "__main__":
    end(main(*sys.argv[1:]))
