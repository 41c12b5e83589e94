"""Every process of a job adds its rank to a common sum over gloo; rank 0 writes it as the run's summary."""

import json
import os
import sys

os.environ.setdefault("RANK", os.environ.get("SLURM_PROCID", "0"))
os.environ.setdefault("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, os.uname().nodename)
if dist.get_rank() == 0:
    with open(f"{sys.argv[1]}/summary.json", "w") as file:
        json.dump({"sum": total.item(), "hosts": sorted(set(names))}, file)
dist.barrier()
dist.destroy_process_group()
