"""The same training run in several processes: torchrun --standalone --nproc-per-node=2 first_ddp.py."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)  # on a node with four GPUs, process 3 takes GPU 3
dist.init_process_group("nccl" if gpu else "gloo")  # 1: the processes find each other
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
data = np.load(Path(__file__).with_name("digits.npz"))
images = torch.from_numpy(data["images"])[:1536, None] / 16
labels = torch.from_numpy(data["labels"])[:1536].long()
train = TensorDataset(images, labels)

sampler = DistributedSampler(train)  # 2: each process takes its own images
loader = DataLoader(train, batch_size=64 // world_size, sampler=sampler)  # 3: the batch is divided
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
model = DistributedDataParallel(model.to(device))  # 4: gradients are averaged over all processes
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)  # 5: another order in each epoch
    total = torch.zeros(1, device=device)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)  # 6: the sum of the losses of all processes
    if rank == 0:
        print(f"epoch {epoch}: {len(loader)} steps, loss {total.item() / len(loader) / world_size:.4f}")

dist.destroy_process_group()
