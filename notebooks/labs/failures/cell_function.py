"""Start a process that runs a function of a cell, which fails, and one that runs a function of this file.

    python -m mpdemo.labs.failures.cell_function cell
    python -m mpdemo.labs.failures.cell_function file

A cell has no file, and neither has the text after ``python -c``. Taught in notebooks/11_when_it_breaks.ipynb.
"""

import os
import sys

CELL = """
import torch.multiprocessing as mp

def train(rank):
    print("training on rank", rank)

mp.spawn(train, nprocs=1)
"""


def train(rank):
    """Say that the function runs."""
    print("training on rank", rank)


def main(where):
    if where == "cell":
        os.execv(sys.executable, [sys.executable, "-c", CELL])
    import torch.multiprocessing as mp

    from mpdemo.labs.failures import cell_function  # not __main__: the child imports it by this name

    mp.spawn(cell_function.train, nprocs=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
