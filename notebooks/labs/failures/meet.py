"""Meet rank 0 at MASTER_ADDR, as init_process_group does, without PyTorch; under srun.

The exercise on batch scripts in notebooks/10_when_it_breaks.ipynb starts it.
"""

import os
import socket
import sys
import time
from contextlib import suppress

PATIENCE = 8.0  # s


def listen(port, others) -> bool:
    """Wait for the other ranks; return whether all came."""
    with socket.create_server(("", port)) as server, suppress(TimeoutError):
        server.settimeout(PATIENCE)
        for _ in range(others):
            server.accept()[0].close()
        return True
    return False


def knock(address, port) -> bool:
    """Connect to rank 0; return whether it was there."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with suppress(OSError):
            socket.create_connection((address, port), timeout=1).close()
            return True
        time.sleep(0.1)
    return False


def main() -> int:
    """Meet the others; return the exit status."""
    rank, world_size = int(os.environ.get("SLURM_PROCID", 0)), int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    met = listen(port, world_size - 1) if rank == 0 else knock(address, port)
    print(f"rank {rank} of {world_size}: {'met the others' if met else f'nobody at {address}'}", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
