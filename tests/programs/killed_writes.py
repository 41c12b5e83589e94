"""Write checkpoints into the run's folder argv[1], killed at random moments.

After each kill the newest checkpoint must be whole, and none that had been finished may be missing. Prints how many
kills met a write, which leaves its temporary folder.
"""

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from mpdemo.training import checkpoint

KILLS, WEIGHTS = 60, 2**19  # 2 MiB
STATE = {"scheduler": {}, "settings": {}, "length": 9, "epoch": 0, "epoch_steps": []}


def write(run, model, step):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpoint.save(run / "checkpoints", model, optimizer, STATE | {"step": step})


def write_until_killed(run, model, step, pipe):
    """Write one checkpoint after the other; each finished one is told through the pipe."""
    for number in itertools.count(step + 1):
        write(run, model, number)
        os.write(pipe, b".")


def main():
    run, chance, step, met = Path(sys.argv[1]), random.Random(0), 1, 0
    torch.set_num_threads(1)
    model = torch.nn.Linear(WEIGHTS, 1)
    write(run, model, step)
    for _ in range(KILLS):
        finished, pipe = os.pipe()
        child = os.fork()
        if child == 0:
            write_until_killed(run, model, step, pipe)
        os.close(pipe)
        time.sleep(chance.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        written = len(os.read(finished, 1000))
        os.close(finished)
        met += bool(list((run / "checkpoints").glob("*.tmp")))
        newest = checkpoint.read(checkpoint.newest(run))["step"]
        assert newest >= step + written, (newest, step, written)
        step = newest
    print(f"{KILLS} kills, {met} met a write; {step} checkpoints, none lost")


if __name__ == "__main__":
    main()
