"""Many small files against one: the seconds to write the same samples, and to read them in random order.

    python -m mpdemo.labs.small_files runs/09_files                         in the run's folder
    python -m mpdemo.labs.small_files runs/09_files "$SCRATCH" "$TMPDIR"    on other disks

In each folder it writes samples of 20 kB, each as a file of its own and then all into one file, reads both in the same
random order, and removes them. Before the first reading the system is told to forget what it keeps of them in memory.
``summary.json`` has a row for each. Taught in notebooks/09_scaling.ipynb.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from mpdemo.world.launch import end

SAMPLES, BYTES = 2000, 20_000
SAMPLE = os.urandom(BYTES)


def write(folder, per_file):
    """Write the samples, so many into each file."""
    for first in range(0, SAMPLES, per_file):
        with open(folder / str(first), "wb") as file:
            for _ in range(per_file):
                file.write(SAMPLE)


def read_files(folder, order):
    """Open one file after the other."""
    for number in order:
        with open(folder / str(number), "rb", buffering=0) as file:
            file.read(BYTES)


def read_one(folder, order):
    """Open the one file once, and read a piece of it for each sample."""
    with open(folder / "0", "rb", buffering=0) as file:
        for number in order:
            file.seek(number * BYTES)
            file.read(BYTES)


def forget(folder):
    """Let the disk have what was written, and the system drop its copy in memory."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(function, *arguments) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def measure(disk) -> list[dict]:
    """Write and read on one disk; return a row for the many files, and one for the single file."""
    rows, order = [], random.Random(0).sample(range(SAMPLES), SAMPLES)
    for files, per_file, read in (("many", 1, read_files), ("one", SAMPLES, read_one)):
        with tempfile.TemporaryDirectory(dir=disk, prefix="mpdemo-files-") as folder:
            folder = Path(folder)
            row = {"disk": str(disk), "files": files, "write": seconds(write, folder, per_file)}
            forget(folder)
            row |= {"read first": seconds(read, folder, order), "read again": seconds(read, folder, order)}
        rows.append(row)
    return rows


def main(out, *disks):
    """Measure on each disk, by default on that of the run's folder, and write the rows."""
    Path(out).mkdir(parents=True, exist_ok=True)
    rows = [row for disk in disks or [out] for row in measure(disk)]
    Path(out, "summary.json").write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    end(main(*sys.argv[1:]))
