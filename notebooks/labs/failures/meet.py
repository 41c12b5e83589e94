"""Meet rank 0 at MASTER_ADDR, as init_process_group does, without PyTorch; under srun.

The exercise on batch scripts in notebooks/11_when_it_breaks.ipynb starts it.
"""

import os
import socket
import sys
import time

PATIENCE = 8.0  # s


def listen(port, others):
    """Wait for the other ranks."""
    with socket.create_server(("", port)) as server:
        server.settimeout(PATIENCE)
        for _ in range(others):
            server.accept()[0].close()


def knock(address, port):
    """Connect to rank 0, which may not listen yet."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), timeout=1).close()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


if __name__ == "__main__":
    rank, world_size = int(os.environ.get("SLURM_PROCID", 0)), int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        listen(port, world_size - 1) if rank == 0 else knock(address, port)
    except OSError:  # a timeout is one
        sys.exit(f"rank {rank} of {world_size}: no answer from {address}")
    print(f"rank {rank} of {world_size}: met the others", flush=True)
