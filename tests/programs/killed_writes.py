"""Write checkpoints, killed 200 times at random moments; argv[1] is the run's folder.

After each kill the newest checkpoint must be whole, and none that had been finished may be missing. Prints how many
kills met a write, which leaves its temporary file.
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

KILLS, WEIGHTS = 200, 2**19  # 2 MiB
PARTS = dict.fromkeys(checkpoint.PARTS) | {"model": {"weight": torch.zeros(WEIGHTS)}}


def write_for_ever(folder, step, pipe):
    """Write one checkpoint after the other; each finished one is told through the pipe."""
    for number in itertools.count(step + 1):
        checkpoint.write(folder, PARTS | {"step": number})
        os.write(pipe, b".")


def main():
    run, chance, step, met = Path(sys.argv[1]), random.Random(0), 1, 0
    checkpoint.write(run / "checkpoints", PARTS | {"step": step})
    for _ in range(KILLS):
        finished, pipe = os.pipe()
        child = os.fork()
        if child == 0:
            write_for_ever(run / "checkpoints", step, pipe)
        os.close(pipe)
        time.sleep(chance.uniform(0.002, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        written = len(os.read(finished, 1000))
        os.close(finished)
        met += bool(list((run / "checkpoints").glob("*.tmp")))
        newest = checkpoint.read(checkpoint.newest(run))["step"]
        assert newest >= step + written, (newest, step, written)
        step = newest
    print(f"{met} of {KILLS} kills met a write; {step} checkpoints, none lost")


if __name__ == "__main__":
    main()
