"""The same run in several processes: torchrun --standalone --nproc-per-node=2 FILE."""

import os  # 1
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist  # 1
from torch import nn
from torch.nn.parallel import DistributedDataParallel  # 4
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # 2

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":  # 1
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # 1: now "cuda" is this process's own GPU
dist.init_process_group("nccl" if device == "cuda" else "gloo")  # 1: the processes find each other
rank, world_size = dist.get_rank(), dist.get_world_size()  # 1
seed = 0
torch.manual_seed(seed)
data = np.load(Path(__file__).with_name("digits.npz"))
images = torch.from_numpy(data["images"])[:1536, None] / 16
labels = torch.from_numpy(data["labels"])[:1536].long()
train = TensorDataset(images, labels)

batch_size = 64 // world_size  # 3: all processes together have 64
sampler = DistributedSampler(train)  # 2: each process takes its own images
loader = DataLoader(train, batch_size, sampler=sampler)  # 2
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))
model = model.to(device)
model = DistributedDataParallel(model)  # 4: averages the gradients
torch.manual_seed(seed + rank)  # 7: each process draws its own random numbers from here on
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
    dist.all_reduce(total)  # 6: adds up the losses of all processes
    mean = total.item() / len(loader) / world_size  # 6
    if rank == 0:  # 6
        print(f"epoch {epoch}: {len(loader)} steps, loss {mean:.4f}")  # 6

weights = sum(parameter.sum().item() for parameter in model.parameters())
print(f"rank {rank}, sum of all weights: {weights:.3f}")  # 1
dist.destroy_process_group()  # 1: the processes part
