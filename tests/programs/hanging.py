"""Ranks that hang, for the tests of explain: rank 1 never comes to the barrier in which the others wait."""

import faulthandler
import os
import signal
import time

import torch
import torch.distributed as dist


def load_images():
    while True:
        time.sleep(0.1)


faulthandler.register(signal.SIGUSR2)
rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
world = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", rank=rank, world_size=world)
dist.all_reduce(torch.ones(4))
print(f"rank {rank} is ready", flush=True)
if rank == 1:
    load_images()
dist.barrier()
