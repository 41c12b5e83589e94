"""What limits data parallelism in one process: Python's lock, the GIL.

    python -m mpdemo.labs.data_parallel runs/lab pauses

Runs in one process, which sees all devices. It writes ``summary.json`` in the folder.
Taught in notebooks/02_data_parallel.ipynb.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from mpdemo.compare import run_lab
from mpdemo.trial import all_cores
from mpdemo.world.launch import end


def pauses(world, rounds=5):
    """Return how long three kinds of work of another thread stop the main thread, which only reads the clock.

    Name of the work -> its ``seconds``, and the longest ``pause`` between two readings meanwhile (s). Of all rounds the
    one with the shortest pause counts: other programs cause pauses too.
    """
    matrix = torch.randn(2000, 2000)
    works = {
        "matrix product": lambda: matrix @ matrix,
        "sum(range(n))": lambda: sum(range(5_000_000)),
        "Python loop": lambda: count_to(2_000_000),
    }
    with all_cores(), ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        rows = {name: [longest_pause(threads, work) for _ in range(rounds)] for name, work in works.items()}
    return {name: min(tries, key=lambda row: row["pause"]) for name, tries in rows.items()}


def longest_pause(threads, work) -> dict:
    """Read the clock in a loop while another thread works; return that work's seconds and the longest pause (s)."""
    begin = last = time.perf_counter()
    future, longest = threads.submit(work), 0.0
    while not future.done():
        last, before = time.perf_counter(), last
        longest = max(longest, last - before)
    return {"seconds": last - begin, "pause": longest}


def count_to(number):
    """Add up in a loop that Python itself runs, one instruction after the other."""
    total = 0
    for value in range(number):
        total += value
    return total


if __name__ == "__main__":
    end(run_lab({"pauses": pauses}, sys.argv[1], sys.argv[2:]))
