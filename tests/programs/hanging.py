"""Ranks that hang, for the tests of explain: rank 1 never comes to the barrier in which the others wait.

hanging.py OUT [dump]    with dump, each rank also writes its flight recorder into OUT
"""

import faulthandler
import os
import pathlib
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist


def load_images():
    while True:
        time.sleep(0.1)


def dump():
    from torch._C._distributed_c10d import _dump_fr_trace

    time.sleep(1)
    pathlib.Path(sys.argv[1], f"trace_rank_{rank}").write_bytes(_dump_fr_trace())


faulthandler.register(signal.SIGUSR2)
rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
world = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", rank=rank, world_size=world)
dist.all_reduce(torch.ones(4))
print(f"rank {rank} is ready", flush=True)
if "dump" in sys.argv:
    threading.Thread(target=dump, daemon=True).start()
if rank == 1:
    load_images()
dist.barrier()
