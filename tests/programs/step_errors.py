"""Leave out steps of a distributed training, one after the other, and print the error that follows (one process)."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class HalfUsed(nn.Module):
    """A model with a layer that its loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def show(action):
    try:
        action()
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")


def join(**variables):
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"} | variables)
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))


def load_half_a_file():
    torch.save(model.state_dict(), "full.pt")
    with open("full.pt", "rb") as full, open("half.pt", "wb") as half:
        half.write(full.read()[:500])
    torch.load("half.pt")


def train_twice():
    wrapped = DistributedDataParallel(HalfUsed())
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()


model = nn.Linear(4, 4)
show(lambda: DistributedDataParallel(model))
show(lambda: dist.init_process_group("gloo"))
with socket.socket() as listener:
    listener.bind(("", 0))
    listener.listen()
    show(lambda: join(MASTER_PORT=str(listener.getsockname()[1])))
show(lambda: join(WORLD_SIZE="2"))
join()
show(lambda: DistributedDataParallel(model, device_ids=[0]))
show(lambda: DataLoader(range(8), sampler=DistributedSampler(range(8)), shuffle=True))
show(lambda: model.load_state_dict(DistributedDataParallel(model).state_dict()))
show(train_twice)
show(load_half_a_file)
dist.barrier()
dist.destroy_process_group()
