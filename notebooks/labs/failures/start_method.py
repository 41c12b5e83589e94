"""Compute a product of matrices, then the same in a child process, which may never end: after a fork it hangs.

    python -m mpdemo.labs.failures.start_method fork
    python -m mpdemo.labs.failures.start_method spawn

PyTorch's threads are started by the first product. A fork copies the memory, which says that they are there, and not
the threads. Taught in notebooks/60_crash.ipynb.
"""

import faulthandler
import multiprocessing
import sys

import torch

PATIENCE = {"fork": 4, "spawn": 60}  # s; a spawned child imports PyTorch anew


def product():
    """Multiply two matrices that are large enough for several threads."""
    faulthandler.dump_traceback_later(2, exit=False)  # where it hangs, for the log
    matrix = torch.ones(600, 600)
    print("the product is done:", (matrix @ matrix)[0, 0].item(), flush=True)
    faulthandler.cancel_dump_traceback_later()


def main(method):
    torch.set_num_threads(2)
    product()
    child = multiprocessing.get_context(method).Process(target=product)
    child.start()
    patience = PATIENCE[method]
    child.join(patience)
    if child.is_alive():
        line = f"the child ({method}) did not end within {patience} s, and is killed"
        print(f"TimeoutError: {line}", flush=True)
        child.kill()
        child.join()
    sys.exit(child.exitcode != 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
