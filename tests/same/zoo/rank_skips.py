"""A rank that finds nothing to learn in its batch goes on to the next one, alone.

https://github.com/NVIDIA-NeMo/Automodel/pull/2468 (2026-06-09)
named: skip|leaves early|unequal|hangs
"""

import torch
import torch.distributed as dist
from common import Net, samples, start
from torch import optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fixed, rank, world = start()
data = samples()
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 32 // world, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        useful = torch.tensor(float(x[:, 0].max() > 1.0))
        if fixed:
            dist.all_reduce(useful, dist.ReduceOp.MAX)
        if not useful:
            continue  # fault
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
