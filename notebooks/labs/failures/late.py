"""Two ranks that hang: rank 1 waits for a file that never appears, and rank 0 waits for rank 1.

Taught in notebooks/61_hang.ipynb.
"""

import faulthandler
import signal
import time
from pathlib import Path

import torch.distributed as dist

from mpdemo.world.env import join_world


def load_batch():
    while not Path("no-such-file").exists():
        time.sleep(0.1)


def main():
    faulthandler.register(signal.SIGUSR2)  # at this signal the rank writes its stack into the log
    with join_world() as world:
        print("rank", world.rank, "is ready\n", end="", flush=True)
        if world.rank == 1:
            load_batch()
        dist.barrier()


if __name__ == "__main__":
    main()
