"""Meet rank 0 at MASTER_ADDR, as init_process_group does, without PyTorch; under srun.

The exercise on job files in notebooks/10_when_it_breaks.ipynb starts it.
"""

import os
import socket
import sys
import time

PATIENCE = 8.0  # s
TASKS = "SLURM_STEP_NUM_TASKS"  # set by srun alone


def listen(port, others) -> int:
    """Wait for the other ranks; return how many came."""
    came = 0
    with socket.create_server(("", port)) as server:
        server.settimeout(PATIENCE)
        try:
            while came < others:
                server.accept()[0].close()
                came += 1
        except TimeoutError:
            pass
    return came


def knock(address, port) -> bool:
    """Connect to rank 0; return whether somebody was there."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.1)
    return False


def main() -> int:
    rank, world_size = (int(os.environ.get(name, number)) for name, number in (("SLURM_PROCID", 0), (TASKS, 1)))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    met = listen(port, world_size - 1) == world_size - 1 if rank == 0 else knock(address, port)
    print(
        f"rank {rank} of {world_size}: {'met the others' if met else f'nobody at {address}'}",
        flush=True,
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
